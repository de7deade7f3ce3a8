"""Tests of live bytes: limits of each ZeRO stage, and savings and traffic of ZeRO-R (1910.02054 sec. 6)."""

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
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.parallel.zero.partition import ALIGNMENT
from tests.launch.runs import wait_for
from tests.parallel.test_parity import BATCH, assert_parity, name_of
from tests.pool import RankPool, pool_of
from tests.training import FEW, TINY, micro_batches, tiny

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
def test_model_states_have_the_bytes_of_the_paper(request: pytest.FixtureRequest, layout: Layout) -> None:
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


SHALLOW = replace(TINY, name="shallow", layers=2)
TP = Layout(tp=2, micro_batch=BATCH, recompute=True)
ALL = {"pa": True, "pa_cpu": True, "md": True}


def replicas(**settings: Any) -> Layout:
    """Return `TP` with two replicas and two micro-batches per replica."""
    return replace(TP, dp=2, micro_batch=2, global_batch=BATCH, **settings)


@pytest.mark.parametrize(
    "layout",
    [
        replace(TP, tp=4, **ALL),
        replace(TP, sp=True, pa_cpu=True, md=True),
        replicas(zero=3, **ALL),
        replicas(zero=2, pa=True, cb=False),
        replicas(tp=1, gradient_as_bucket_view=False, cb=False),
        replicas(tp=1, zero=1, zero1_reduce="all-reduce", cb=False),
        replace(TP, pp=2, micro_batch=2, schedule="interleaved", chunks=2, **ALL),
        replicas(tp=1, pp=2, zero=2, schedule="gpipe", pa_cpu=True, md=True),
    ],
    ids=name_of,
)
def test_fp32_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    model = TINY if layout.chunks > 1 else SHALLOW
    assert_parity(request, layout, model, dropout=0.1, **FEW)


def checkpoint_bytes(layout: Layout) -> int:
    """Return the bytes of all checkpoints of one micro-batch, not divided by tp."""
    return TINY.layers * layout.micro_batch * TINY.seq * TINY.hidden * 4


def test_pa_divides_checkpoints_by_tp(four: RankPool) -> None:
    """P_a leaves 1/tp of the memory (sec. 6.1). It adds one all-gather of b s h per block (sec. 8), 1/12 of the traffic
    of the block's 2 + 2 + 2 all-reduces."""
    plain = replace(TP, tp=4)
    size = checkpoint_bytes(plain)
    before, after = (four.run(measure, tiny(layout)) for layout in (plain, replace(plain, pa=True)))
    for without, with_it in zip(before, after, strict=True):
        assert without["most"][Category.CHECKPOINTS] == size
        assert with_it["most"][Category.CHECKPOINTS] == size // 4
        # Between forward and backward, P_a changes only the checkpoints: the graph does not retain the inputs.
        assert with_it["forward"][Category.CHECKPOINTS] == size // 4
        assert with_it["forward"]["total"] == without["forward"]["total"] - size + size // 4
        rows = dict(with_it["rows"])
        gathered = rows.pop(("all_gather", "tp", "checkpoints"))
        assert rows == without["rows"], "other traffic is unchanged"
        assert (gathered["calls"], gathered["payload_bytes"]) == (TINY.layers, size)
        assert 12 * gathered["sent_bytes"] == rows["all_reduce", "tp", "block"]["sent_bytes"]


def test_arena_fits_the_micro_batches_in_flight(four: RankPool) -> None:
    """1F1B has two micro-batches in flight on the first of two stages and one on the last. P_a halves their bytes."""
    layout = replace(TP, pp=2, micro_batch=2, pa=True, md=True)
    size = checkpoint_bytes(layout) // 2 // 2
    found = four.run(measure, tiny(layout))
    for moment in ("final", "most"):
        assert [seen[moment][Category.CHECKPOINTS] for seen in found] == [2 * size, 2 * size, size, size]


@pytest.mark.parametrize(("precision", "zero"), [("fp32", 0), ("bf16", 1), ("fp32", 2)])
def test_fused_buffer_takes_4_psi_without_constant_buffers(two: RankPool, precision: str, zero: int) -> None:
    """Without C_B, the fp32 buffer has 4 Psi bytes. With C_B, no buffer exceeds the limit (sec. 3.2, 6.2)."""
    limit = 40_000
    layout = Layout(dp=2, zero=zero, precision=precision, bucket_bytes=limit)
    for seen in two.run(measure, tiny(replace(layout, cb=False))):
        (padded,) = seen["padded"]
        assert seen["fused"] == 4 * padded > 4 * limit
        sent = seen["rows"]["all_reduce" if zero == 0 else "reduce_scatter", "dp", "gradients"]
        assert (sent["calls"], sent["payload_bytes"]) == (1, 4 * padded)
        assert seen["final"][Category.COMMUNICATION] == 0
    for seen in two.run(measure, tiny(layout)):
        assert max(seen["padded"]) * (4 if precision == "fp32" else 2) <= limit
        assert seen["fused"] <= limit
        # gloo receives half of each bucket in reduction, and of the bucket that is launched.
        assert seen["most"][Category.COMMUNICATION] <= (GradientReducer.IN_FLIGHT + 1) * limit // 2


@pytest.mark.parametrize("zero", [2, 3])
def test_md_allocates_gradients_once(two: RankPool, zero: int) -> None:
    """Stages 2 and 3 hold gradient shards, and buffers for whole gradients whose size does not grow with depth."""
    layout = Layout(dp=2, zero=zero, bucket_bytes=40_000, global_batch=4, md=True)
    for seen in two.run(measure, tiny(layout)):
        padded = seen["padded"]
        pool = sum(sorted(padded)[-GradientReducer.IN_FLIGHT - 2 :]) * 4
        for moment in ("initial", "final", "most"):
            assert seen[moment][Category.GRADIENTS] == sum(padded) // 2 * 4 + pool
