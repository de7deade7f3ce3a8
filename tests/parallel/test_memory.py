"""Tests that live bytes of each ZeRO stage stay within the partition's limits, during initialisation and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout, Model
from repro.config.enums import MODEL_STATES, Category
from repro.engines.native.engine import NativeEngine
from repro.measure.memory import MemoryTracker
from repro.parallel import mesh as meshes
from repro.parallel import storage
from repro.parallel.zero.partition import ALIGNMENT
from tests.launch.runs import wait_for
from tests.parallel.test_parity import name_of
from tests.pool import RankPool, pool_of
from tests.training import micro_batches, tiny

MODEL = Model(name="deep", layers=6, hidden=32, heads=4, vocab=64, seq=16)


def measure(experiment: Experiment, steps: int = 2) -> dict[str, Any]:
    """Return this rank's live bytes at several moments of some steps, and the traffic of the last step."""
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    found: dict[str, Any] = {"fused": 0}
    with MemoryTracker() as tracker:
        engine = NativeEngine(experiment, mesh, torch.device("cpu"))
        found["initial"] = tracker.live()

        def observe_buffers(*_: object) -> None:
            """Record the bytes of the largest communication buffer."""
            for record in tracker._live.values():
                live = record.reference()
                if live is not None and storage.category_of(live) == Category.COMMUNICATION:
                    found["fused"] = max(found["fused"], live.nbytes())

        def observe_phase(phase: str) -> None:
            tracker.phase = phase
            if phase == "backward":
                found["forward"] = tracker.live()

        mesh.ledger.observers.append(observe_buffers)
        for step in range(steps):
            mesh.ledger.reset()
            engine.step(micro_batches(experiment, mesh.dp.rank, step), observe_phase)
            engine.synchronize()
        # gloo's threads free the last message after the wait for it returns.
        idle_bytes = found["initial"][Category.COMMUNICATION]
        wait_for(lambda: tracker.live()[Category.COMMUNICATION] <= idle_bytes, seconds=5)
        found["final"] = tracker.live()
    arenas = [engine.checkpoints.arena if engine.checkpoints else None]
    arenas += [bucket.pool for bucket in engine.buckets]
    assert all(arena is None or arena.used == 0 for arena in arenas)
    return found | {
        "most": tracker.most,
        "rows": {(r["op"], r["group"], r["purpose"]): r for r in mesh.ledger.rows()},
        "psi": engine.local_parameters() + engine.padding(),
        "padding": engine.padding(),
        "padded": [bucket.plan.padded for bucket in engine.buckets],
    }


DP2 = Layout(dp=2, bucket_bytes=30_000)
DP4 = Layout(dp=4, bucket_bytes=30_000)


@pytest.mark.parametrize(
    "layout",
    [
        replace(DP4, precision="bf16", global_batch=8),
        replace(DP2, precision="fp16", grad_dtype="fp32"),
        replace(DP4, zero=1, precision="fp16", recompute=True),
        replace(DP2, zero=1, precision="bf16", grad_dtype="fp32"),
        replace(DP4, zero=2, precision="bf16", recompute=True, global_batch=8),
        replace(DP2, zero=2, precision="fp16", grad_dtype="fp32"),
        replace(DP4, zero=2),
        replace(DP4, zero=3, precision="bf16", recompute=True, global_batch=8),
        replace(DP2, zero=3, precision="fp16", grad_dtype="fp32"),
        replace(DP2, zero=3),
    ],
    ids=name_of,
)
def test_model_states_equal_the_papers_bytes_and_peaks_are_limited(
    request: pytest.FixtureRequest, layout: Layout
) -> None:
    """States are 2 Psi, 2 Psi and 12 Psi (fp32: 4, 4 and 8 Psi), each divided by Nd from its stage on
    (1910.02054 sec. 3.1, 5). Psi includes padding. Stage 3 gathers at most two units, and stages 2 and 3 allocate full
    gradients of few buckets."""
    zero, is_fp32 = layout.zero, layout.precision == "fp32"
    p, k = (4, 8) if is_fp32 else (2, 12)
    g = 4 if is_fp32 or layout.grad_dtype == "fp32" else 2
    for seen in pool_of(request, layout).run(measure, tiny(layout, MODEL)):
        most, psi, units = seen["most"], seen["psi"], sorted(seen["padded"])
        assert seen["padding"] < len(units) * layout.dp * ALIGNMENT
        bytes_from_stage = {3: p, 2: g, 1: k}
        expected = [n * psi / (layout.dp if zero >= first else 1) for first, n in bytes_from_stage.items()]
        # The step counter and, in fp16, the loss scale belong to no category.
        assert [seen["final"][category] for category in MODEL_STATES] == expected
        parameters, gradients, optimizer = expected
        assert most[Category.OPTIMIZER] == seen["initial"][Category.OPTIMIZER] == optimizer
        if zero == 3:
            # In addition to the shards: the largest unit (embeddings) and one block, or two blocks.
            parameters += p * (units[-1] + units[-2])
            assert most[Category.PARAMETERS] < p * psi * (1 / layout.dp + 0.5), "most are gathered at once"
        assert most[Category.PARAMETERS] <= parameters
        if zero >= 2:
            # Two buckets in reduction and the one being filled. If several buckets contain the parameters of a block,
            # one more is open. Under stage 3 also the bucket of the outer unit is open, from the head's first gradient
            # to the embedding's last gradient.
            few = 3 if zero == 3 or g == 2 else 4
            gradients += g * (sum(units[-few:]) + (seen["padded"][-1] if zero == 3 else 0))
        assert most[Category.GRADIENTS] <= gradients


@pytest.mark.parametrize("cb", [True, False], ids=["", "fused"])
def test_separate_buckets_double_the_gradient_bytes(two: RankPool, cb: bool) -> None:
    """DDP of torch in 2020 has 2 Psi in addition to 16 Psi at all times."""
    layout = Layout(dp=2, cb=cb, gradient_as_bucket_view=False, precision="bf16", bucket_bytes=20_000)
    for seen in two.run(measure, tiny(layout, replace(MODEL, layers=2))):
        psi = seen["psi"]
        assert len(seen["padded"]) > 1 or not cb
        for live in (seen["initial"], seen["final"]):
            ratios = {c: live[c] / psi for c in (*MODEL_STATES, Category.COMMUNICATION)}
            assert ratios == {"parameters": 2, "gradients": 2, "optimizer": 12, "communication": 2}
        # Without C_B, the fused fp32 buffer is a third copy during the reduction.
        assert cb or seen["most"][Category.COMMUNICATION] >= 2 * psi + 4 * psi


def gathered_bytes_after_evaluation(experiment: Experiment) -> int:
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    batch = micro_batches(experiment, mesh.dp.rank, 0)[0]
    with torch.no_grad():
        engine.parts[0].sharded.begin(0, 1)
        engine.parts[0].model(batch.tokens, batch.targets, batch.place)
    return sum(bucket.full.untyped_storage().nbytes() for bucket in engine.buckets)


def test_stage_3_frees_gathered_parameters_after_evaluation(two: RankPool) -> None:
    """The forward pass runs under `torch.no_grad`."""
    assert two.run(gathered_bytes_after_evaluation, tiny(Layout(dp=2, zero=3), MODEL)) == [0, 0]
