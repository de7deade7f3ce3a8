"""Tests of ZeRO-R (1910.02054 sec. 6): parity with one process, less memory, and the additional traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from repro.config import Layout
from repro.config.enums import Category
from repro.parallel.zero.grad_reduce import GradientReducer
from tests.parallel.test_memory import measure
from tests.parallel.test_parity import BATCH, assert_parity, name_of
from tests.pool import RankPool
from tests.training import FEW, TINY, tiny

SHALLOW = replace(TINY, name="shallow", layers=2)
TP = Layout(tp=2, micro_batch=BATCH, recompute=True)
ALL = {"pa": True, "pa_cpu": True, "md": True}


def replicas(**settings: Any) -> Layout:
    """Return `TP` with two replicas and two micro-batches per replica."""
    return replace(TP, dp=2, micro_batch=2, global_batch=BATCH, **settings)


@pytest.mark.parametrize(
    "layout",
    [
        replace(TP, pa=True),
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
    """In addition to the shards, stages 2 and 3 have a pool of constant size."""
    layout = Layout(dp=2, zero=zero, bucket_bytes=40_000, global_batch=4, md=True)
    for seen in two.run(measure, tiny(layout)):
        padded = seen["padded"]
        pool = sum(sorted(padded)[-GradientReducer.IN_FLIGHT - 2 :]) * 4
        for moment in ("initial", "final", "most"):
            assert seen[moment][Category.GRADIENTS] == sum(padded) // 2 * 4 + pool
