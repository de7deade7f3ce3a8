"""No rank ever holds what its stage has partitioned away: live storages, watched through initialisation and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from repro.config import Experiment, Layout, Model
from repro.config.enums import MODEL_STATES, Category
from repro.engines.native.engine import NativeEngine
from repro.measure.memory import MemoryTracker
from repro.parallel import mesh as meshes
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.parallel.zero.partition import ALIGNMENT
from repro.simulate.memory.live_bytes import LiveBytes, measure_live_bytes
from repro.simulate.trace.events import Message, Wait
from repro.simulate.trace.roles import roles, trace
from tests.launch.runs import wait_for
from tests.pool import RankPool
from tests.training import micro_batches, tiny

MODEL = Model(name="deep", layers=6, hidden=32, heads=4, vocab=64, seq=16)
BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12), "fp16": (2, 2, 12)}
"""Bytes per parameter of parameters, gradients and optimizer states (1910.02054 sec. 3.1, K = 12 when mixed)."""


def watch(experiment: Experiment, steps: int) -> dict[str, Any]:
    """States between steps and the largest amount of each category at any moment, on this rank."""
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, "cpu")
    with MemoryTracker() as tracker:
        engine = NativeEngine(experiment, mesh, torch.device("cpu"))
        born = tracker.live()
        for step in range(steps):
            engine.step(
                micro_batches(experiment, mesh.dp.rank, step), lambda phase: setattr(tracker, "phase", phase)
            )
            engine.synchronize()
        # gloo's threads let go of the last message a moment after who waited for it went on.
        wait_for(lambda: tracker.live()[Category.COMMUNICATION] <= born[Category.COMMUNICATION], seconds=5)
        rest = tracker.live()
    buckets = engine.buckets
    return {
        "born": born,
        "rest": rest,
        "most": tracker.most,
        "psi": engine.local_parameters(),
        "padding": engine.padding(),
        "buckets": [bucket.plan.padded for bucket in buckets],
    }


def states(psi: int, nd: int, stage: int, precision: str) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states by 1910.02054 sec. 5."""
    p, g, k = BYTES[precision]
    return (
        p * psi / (nd if stage >= 3 else 1),
        g * psi / (nd if stage >= 2 else 1),
        k * psi / (nd if stage >= 1 else 1),
    )


@pytest.mark.parametrize(("pool", "precision"), [("two", "bf16"), ("two", "fp32"), ("four", "fp16")])
@pytest.mark.parametrize("zero", range(4))
def test_states_are_what_the_paper_says_to_the_byte(
    request: pytest.FixtureRequest, pool: str, zero: int, precision: str
) -> None:
    """2 Psi, 2 Psi, 12 Psi (fp32: 4, 4, 8), each divided by Nd from its stage on; padding counted as Psi."""
    ranks: RankPool = request.getfixturevalue(pool)
    layout = Layout(dp=ranks.world, zero=zero, precision=precision, bucket_bytes=20_000)
    for seen in ranks.run(watch, tiny(layout, replace(MODEL, layers=2)), 2):
        psi = seen["psi"] + seen["padding"]
        assert seen["padding"] < len(seen["buckets"]) * ranks.world * ALIGNMENT
        expected = states(psi, ranks.world, zero, precision)
        found = [seen["rest"][c] for c in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)]
        # Step counter and, in fp16, the loss scale are the few bytes that are no one's.
        assert found == [pytest.approx(value, abs=0) for value in expected]


@pytest.mark.parametrize("zero", range(4))
def test_fp32_gradients_are_4_bytes_a_parameter(two: RankPool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, precision="fp16", grad_dtype="fp32", bucket_bytes=20_000)
    for seen in two.run(watch, tiny(layout, replace(MODEL, layers=2)), 2):
        psi = seen["psi"] + seen["padding"]
        gradients = 4 * psi / (2 if zero >= 2 else 1)
        assert seen["rest"][Category.GRADIENTS] == gradients
        parameters, _, optimizer = states(psi, 2, zero, "fp16")
        assert (seen["rest"][Category.PARAMETERS], seen["rest"][Category.OPTIMIZER]) == (
            parameters,
            optimizer,
        )
        # Full gradients of stages 2 and 3 are those of a few buckets.
        few = (2 + GradientReducer.IN_FLIGHT) * 4 * max(seen["buckets"])
        assert seen["most"][Category.GRADIENTS] <= gradients + (few if zero >= 2 else 0)


@pytest.mark.parametrize(("gloo", "zero", "limited"), [(False, 1, False), (True, 1, True), (False, 2, True)])
def test_reductions_wait_for_each_other_only_if_they_need_memory(
    gloo: bool, zero: int, limited: bool
) -> None:
    """Stage 1 reduces permanent fp32 gradients in place, so all its reductions may be under way."""
    layout = Layout(dp=2, zero=zero, precision="bf16", grad_dtype="fp32", bucket_bytes=20_000)
    experiment = tiny(layout, replace(MODEL, layers=2))
    traced = trace(experiment, roles(experiment)[0], gloo=gloo)
    works: set[int] = set()
    most = buckets = 0
    for event in traced.events:
        if isinstance(event, Message) and event.purpose == "gradients":
            works.add(event.work)
            buckets += 1
        elif isinstance(event, Wait):
            works.discard(event.work)
        most = max(most, len(works))
    assert buckets > 3
    assert most == (GradientReducer.IN_FLIGHT if limited else buckets)
    memory = measure_live_bytes(traced.events)
    assert memory.most[Category.COMMUNICATION] <= (GradientReducer.IN_FLIGHT + 1) * 20_000 // 2 * gloo


@pytest.mark.parametrize("cb", [True, False], ids=["", "fused"])
def test_buckets_beside_the_gradients_are_one_copy_more_to_the_byte(two: RankPool, cb: bool) -> None:
    """torch's DDP of 2020 kept 2 Psi beside 16 Psi, from the start to the end; counted, and simulated."""
    layout = Layout(dp=2, cb=cb, gradient_as_bucket_view=False, precision="bf16", bucket_bytes=20_000)
    experiment = tiny(layout, replace(MODEL, layers=2))
    simulated = LiveBytes(trace(experiment, roles(experiment)[0], gloo=True).events).after(-1)
    for seen in two.run(watch, experiment, 2):
        psi = seen["psi"] + seen["padding"]
        assert len(seen["buckets"]) > 1 or not cb
        for live in (seen["born"], seen["rest"], simulated):
            held = {c: live[c] / psi for c in (*MODEL_STATES, Category.COMMUNICATION)}
            assert held == {"parameters": 2, "gradients": 2, "optimizer": 12, "communication": 2}
        # What is fused without C_B is a third copy, in fp32, while it is reduced.
        assert cb or seen["most"][Category.COMMUNICATION] >= 2 * psi + 4 * psi


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_never_more_than_the_stage_allows(four: RankPool, zero: int, recompute: bool) -> None:
    """At no moment, initialisation included: stage 3 at most two units in full, stage 2 and 3 a few buckets.

    Every stage with and without recomputation, and with one micro-batch a step and two; either way of recomputing
    with either number of them.
    """
    accumulation = 1 + (zero + recompute) % 2
    layout = Layout(
        dp=4,
        zero=zero,
        precision="bf16",
        recompute=recompute,
        bucket_bytes=30_000,
        global_batch=4 * accumulation,
    )
    for seen in four.run(watch, tiny(layout, MODEL), 2):
        most, psi = seen["most"], seen["psi"] + seen["padding"]
        parameters, gradients, optimizer = states(psi, 4, zero, "bf16")
        blocks = sorted(2 * size for size in seen["buckets"])
        assert most[Category.OPTIMIZER] == optimizer
        if zero == 3:
            # The largest unit (embeddings) and one block, or two blocks, beside the shards.
            parameters += blocks[-1] + blocks[-2]
        assert most[Category.PARAMETERS] <= parameters
        if zero == 3:
            assert most[Category.PARAMETERS] < 2 * psi * 0.75, "most of the model was there at once"
        if zero >= 2:
            # Two buckets under reduction and the one that fills; under stage 3 also the outer unit's,
            # which fills from the head's first gradient to the embedding's last.
            gradients += sum(blocks[-3:]) + (2 * seen["buckets"][-1] if zero == 3 else 0)
        assert most[Category.GRADIENTS] <= gradients
        assert seen["born"][Category.OPTIMIZER] == optimizer


def test_stage_3_frees_everything_after_evaluation(two: RankPool) -> None:
    """A forward pass without gradients leaves nothing gathered."""
    for left in two.run(_evaluate, tiny(Layout(dp=2, zero=3), MODEL)):
        assert left == 0


def _evaluate(experiment: Experiment) -> int:
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    batch = micro_batches(experiment, mesh.dp.rank, 0)[0]
    with torch.no_grad():
        engine.parts[0].sharded.begin(0, 1)
        engine.parts[0].model(batch.tokens, batch.targets, batch.place)
    return sum(bucket.full.untyped_storage().nbytes() for bucket in engine.buckets)


def test_activations_fall_with_recomputation(two: RankPool) -> None:
    """One checkpoint a block instead of all of its activations (1910.02054 sec. 3.2)."""
    plain = Layout(dp=2, micro_batch=8)
    with_it = two.run(watch, tiny(replace(plain, recompute=True), MODEL), 1)[0]["most"]
    without = two.run(watch, tiny(plain, MODEL), 1)[0]["most"]
    kept = with_it[Category.ACTIVATIONS] + with_it[Category.CHECKPOINTS]
    assert kept < 0.4 * without[Category.ACTIVATIONS]


def test_sequence_parallelism_divides_norms_and_dropouts(two: RankPool) -> None:
    """2205.05198 sec. 4.2.2: what tp alone leaves whole is divided by sp."""
    plain = Layout(tp=2, micro_batch=8)
    alone = two.run(watch, tiny(plain, MODEL), 1)[0]["most"]
    split = two.run(watch, tiny(replace(plain, sp=True), MODEL), 1)[0]["most"]
    assert split[Category.ACTIVATIONS] < 0.85 * alone[Category.ACTIVATIONS]


def test_shapes_are_no_memory() -> None:
    """A model on `meta`, and the fake tensors on which DTensor tries operators, have none until they are given it."""
    with MemoryTracker() as tracker:
        model = torch.nn.Linear(10, 10, bias=False, device="meta")
        with FakeTensorMode():
            fake = torch.ones(1000) + 1
        assert fake.device.type == "cpu"
        assert tracker.live()["total"] == tracker.peak["total"] == 0
        model.to_empty(device="cpu")
        assert tracker.live()["total"] == tracker.peak["total"] == 400
