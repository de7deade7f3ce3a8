"""Tests that live bytes of each ZeRO stage stay within the partition's limits, during initialisation and steps."""

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


def measure(experiment: Experiment, steps: int) -> dict[str, Any]:
    """Return this rank's live bytes after initialisation and after the last step, and the peak of each category."""
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, "cpu")
    with MemoryTracker() as tracker:
        engine = NativeEngine(experiment, mesh, torch.device("cpu"))
        initial = tracker.live()
        for step in range(steps):
            engine.step(
                micro_batches(experiment, mesh.dp.rank, step), lambda phase: setattr(tracker, "phase", phase)
            )
            engine.synchronize()
        # gloo's threads free the last message after the wait for it returns.
        wait_for(lambda: tracker.live()[Category.COMMUNICATION] <= initial[Category.COMMUNICATION], seconds=5)
        final = tracker.live()
    buckets = engine.buckets
    return {
        "initial": initial,
        "final": final,
        "most": tracker.most,
        "psi": engine.local_parameters(),
        "padding": engine.padding(),
        "buckets": [bucket.plan.padded for bucket in buckets],
    }


def states(psi: int, nd: int, stage: int, precision: str) -> tuple[float, float, float]:
    """Return bytes of parameters, gradients and optimizer states (1910.02054 sec. 5)."""
    p, g, k = BYTES[precision]
    return (
        p * psi / (nd if stage >= 3 else 1),
        g * psi / (nd if stage >= 2 else 1),
        k * psi / (nd if stage >= 1 else 1),
    )


@pytest.mark.parametrize(("pool", "precision"), [("two", "bf16"), ("two", "fp32"), ("four", "fp16")])
@pytest.mark.parametrize("zero", range(4))
def test_model_states_equal_the_papers_bytes(
    request: pytest.FixtureRequest, pool: str, zero: int, precision: str
) -> None:
    """2 Psi, 2 Psi and 12 Psi (fp32: 4, 4 and 8 Psi), each divided by Nd from its stage on. Psi includes padding."""
    ranks: RankPool = request.getfixturevalue(pool)
    layout = Layout(dp=ranks.world, zero=zero, precision=precision, bucket_bytes=20_000)
    for seen in ranks.run(measure, tiny(layout, replace(MODEL, layers=2)), 2):
        psi = seen["psi"] + seen["padding"]
        assert seen["padding"] < len(seen["buckets"]) * ranks.world * ALIGNMENT
        expected = states(psi, ranks.world, zero, precision)
        found = [seen["final"][c] for c in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)]
        # The step counter and, in fp16, the loss scale belong to no category.
        assert found == [pytest.approx(value, abs=0) for value in expected]


@pytest.mark.parametrize("zero", range(4))
def test_fp32_gradients_take_4_bytes_per_parameter(two: RankPool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, precision="fp16", grad_dtype="fp32", bucket_bytes=20_000)
    for seen in two.run(measure, tiny(layout, replace(MODEL, layers=2)), 2):
        psi = seen["psi"] + seen["padding"]
        gradients = 4 * psi / (2 if zero >= 2 else 1)
        assert seen["final"][Category.GRADIENTS] == gradients
        parameters, _, optimizer = states(psi, 2, zero, "fp16")
        assert (seen["final"][Category.PARAMETERS], seen["final"][Category.OPTIMIZER]) == (
            parameters,
            optimizer,
        )
        # Stages 2 and 3 allocate full gradients of few buckets at a time.
        few = (2 + GradientReducer.IN_FLIGHT) * 4 * max(seen["buckets"])
        assert seen["most"][Category.GRADIENTS] <= gradients + (few if zero >= 2 else 0)


@pytest.mark.parametrize(("gloo", "zero", "limited"), [(False, 1, False), (True, 1, True), (False, 2, True)])
def test_concurrent_reductions_are_limited_only_if_they_allocate(
    gloo: bool, zero: int, limited: bool
) -> None:
    """Stage 1 reduces permanent fp32 gradients in place, so all its reductions may run concurrently."""
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
def test_separate_buckets_double_the_gradient_bytes(two: RankPool, cb: bool) -> None:
    """DDP of torch in 2020 has 2 Psi in addition to 16 Psi at all times. Counted and simulated bytes are equal."""
    layout = Layout(dp=2, cb=cb, gradient_as_bucket_view=False, precision="bf16", bucket_bytes=20_000)
    experiment = tiny(layout, replace(MODEL, layers=2))
    simulated = LiveBytes(trace(experiment, roles(experiment)[0], gloo=True).events).after(-1)
    for seen in two.run(measure, experiment, 2):
        psi = seen["psi"] + seen["padding"]
        assert len(seen["buckets"]) > 1 or not cb
        for live in (seen["initial"], seen["final"], simulated):
            ratios = {c: live[c] / psi for c in (*MODEL_STATES, Category.COMMUNICATION)}
            assert ratios == {"parameters": 2, "gradients": 2, "optimizer": 12, "communication": 2}
        # Without C_B, the fused fp32 buffer is a third copy during the reduction.
        assert cb or seen["most"][Category.COMMUNICATION] >= 2 * psi + 4 * psi


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_peak_bytes_stay_within_the_limits_of_the_stage(four: RankPool, zero: int, recompute: bool) -> None:
    """Stage 3 gathers at most two units. Stages 2 and 3 allocate full gradients of few buckets.

    Of the runs with and without recomputation, one has one micro-batch per step and the other has two.
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
    for seen in four.run(measure, tiny(layout, MODEL), 2):
        most, psi = seen["most"], seen["psi"] + seen["padding"]
        parameters, gradients, optimizer = states(psi, 4, zero, "bf16")
        blocks = sorted(2 * size for size in seen["buckets"])
        assert most[Category.OPTIMIZER] == optimizer
        if zero == 3:
            # In addition to the shards: the largest unit (embeddings) and one block, or two blocks.
            parameters += blocks[-1] + blocks[-2]
        assert most[Category.PARAMETERS] <= parameters
        if zero == 3:
            assert most[Category.PARAMETERS] < 2 * psi * 0.75, "most parameters are gathered at once"
        if zero >= 2:
            # Two buckets in reduction and the one being filled. Under stage 3 also the bucket of the outer unit,
            # which is open from the head's first gradient to the embedding's last gradient.
            gradients += sum(blocks[-3:]) + (2 * seen["buckets"][-1] if zero == 3 else 0)
        assert most[Category.GRADIENTS] <= gradients
        assert seen["initial"][Category.OPTIMIZER] == optimizer


def test_stage_3_frees_gathered_parameters_after_evaluation(two: RankPool) -> None:
    """The forward pass runs under `torch.no_grad`."""
    for gathered_bytes in two.run(_evaluate, tiny(Layout(dp=2, zero=3), MODEL)):
        assert gathered_bytes == 0


def _evaluate(experiment: Experiment) -> int:
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    batch = micro_batches(experiment, mesh.dp.rank, 0)[0]
    with torch.no_grad():
        engine.parts[0].sharded.begin(0, 1)
        engine.parts[0].model(batch.tokens, batch.targets, batch.place)
    return sum(bucket.full.untyped_storage().nbytes() for bucket in engine.buckets)


def test_recomputation_retains_one_checkpoint_per_block(two: RankPool) -> None:
    """The checkpoint replaces all activations of the block (1910.02054 sec. 3.2)."""
    plain = Layout(dp=2, micro_batch=8)
    recomputed = two.run(measure, tiny(replace(plain, recompute=True), MODEL), 1)[0]["most"]
    without = two.run(measure, tiny(plain, MODEL), 1)[0]["most"]
    retained = recomputed[Category.ACTIVATIONS] + recomputed[Category.CHECKPOINTS]
    assert retained < 0.4 * without[Category.ACTIVATIONS]


def test_sequence_parallelism_divides_activations_that_tp_replicates(two: RankPool) -> None:
    """Sequence parallelism divides the activations of norms and dropouts (2205.05198 sec. 4.2.2)."""
    plain = Layout(tp=2, micro_batch=8)
    replicated = two.run(measure, tiny(plain, MODEL), 1)[0]["most"]
    divided = two.run(measure, tiny(replace(plain, sp=True), MODEL), 1)[0]["most"]
    assert divided[Category.ACTIVATIONS] < 0.85 * replicated[Category.ACTIVATIONS]


def test_meta_and_fake_tensors_have_no_bytes() -> None:
    """`to_empty` allocates the memory of a `meta` model. DTensor tries operators on fake tensors."""
    with MemoryTracker() as tracker:
        model = torch.nn.Linear(10, 10, bias=False, device="meta")
        with FakeTensorMode():
            fake = torch.ones(1000) + 1
        assert fake.device.type == "cpu"
        assert tracker.live()["total"] == tracker.peak["total"] == 0
        model.to_empty(device="cpu")
        assert tracker.live()["total"] == tracker.peak["total"] == 400
