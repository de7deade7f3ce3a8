"""Parity tests: DeepSpeed and engine native have equal losses, norms and parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout, Model
from tests.engines.needs import needs
from tests.parallel.test_architectures import FAMILIES
from tests.pool import RankPool
from tests.training import LEARNING, Trained, smallest, tiny, train

pytestmark = needs("deepspeed")

PLAIN = [Layout(dp=2, zero=zero, micro_batch=4, global_batch=8) for zero in range(4)]
VARIED = {
    **{f"z{layout.zero}-accumulate": replace(layout, micro_batch=2, recompute=True) for layout in PLAIN},
    **{f"z{layout.zero}-small-buckets": replace(layout, bucket_bytes=20_000) for layout in PLAIN[1:]},
    **{f"z{layout.zero}-waits": replace(layout, micro_batch=2, overlap=False) for layout in PLAIN[:3]},
    "z1-all-reduce": replace(PLAIN[1], zero1_reduce="all-reduce"),
}


def compare(found: list[Trained], expected: list[Trained], rtol: float) -> None:
    """Compare losses, norms and skipped steps of every rank, and parameters as one vector."""
    for theirs, ours in zip(found, expected, strict=True):
        assert theirs.loss == pytest.approx(ours.loss, rel=rtol, abs=0.0)
        assert theirs.norm == pytest.approx(ours.norm, rel=10 * rtol, abs=0.0)
        assert theirs.skipped == ours.skipped
        assert theirs.parameters.keys() == ours.parameters.keys()
        vector = torch.cat([p.float().flatten() for p in ours.parameters.values()])
        other = torch.cat([theirs.parameters[name].float().flatten() for name in ours.parameters])
        assert (vector - other).norm() <= rtol * vector.norm()


def train_both(
    pool: RankPool, layout: Layout, model: Model | None = None, **training: Any
) -> tuple[list[Trained], list[Trained]]:
    """Return the results of all ranks in DeepSpeed and in engine native."""
    model = model or smallest(layout)
    plain = replace(layout, offload_optimizer=False)
    theirs, ours = (
        pool.run(train, tiny(used, model, engine, **training))
        for used, engine in ((layout, "deepspeed"), (plain, "native"))
    )
    assert ours[0].loss[-1] < 0.9 * ours[0].loss[0], "the loss must fall, or parity proves little"
    return theirs, ours


@pytest.mark.parametrize("layout", PLAIN, ids=lambda layout: f"z{layout.zero}")
def test_20_steps_agree_with_engine_native(two: RankPool, layout: Layout) -> None:
    compare(*train_both(two, layout), 1e-5)


@pytest.mark.parametrize("layout", VARIED.values(), ids=VARIED)
def test_accumulation_buckets_and_overlap_preserve_parity(two: RankPool, layout: Layout) -> None:
    compare(*train_both(two, layout, **LEARNING), 1e-5)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", PLAIN[3]),
        ("bloom", VARIED["z3-accumulate"]),
        ("falcon", PLAIN[2]),
        ("llama", Layout(tp=2, zero=1, micro_batch=8)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"tp{value.tp}-z{value.zero}",
)
def test_other_architectures_agree_with_engine_native(two: RankPool, family: str, layout: Layout) -> None:
    compare(*train_both(two, layout, FAMILIES[family], **LEARNING), 1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("zero", range(4))
def test_mixed_precision_agrees_within_rounding(two: RankPool, zero: int, precision: str) -> None:
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    layout = replace(PLAIN[zero], precision=precision)
    # Stage 0 sums gradients before it divides by dp, so that half the scale overflows: use a small scale.
    theirs, ours = train_both(two, layout, loss_scale=2.0**12, **LEARNING)
    compare(theirs, ours, 4 * unit)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_loss_scales_and_skipped_steps_agree(two: RankPool, zero: int) -> None:
    """The first steps overflow; with hysteresis, both engines skip the same steps."""
    rules = {"loss_scale": 2.0**22, "steps": 20, "lr": 6e-3}
    theirs, ours = train_both(two, replace(PLAIN[zero], precision="fp16"), **rules)
    assert len(ours[0].skipped) > 3
    assert theirs[0].skipped == ours[0].skipped
    assert theirs[0].scale == ours[0].scale


@pytest.mark.parametrize("zero", range(4))
def test_tensor_parallel_training_agrees_with_engine_native(four: RankPool, zero: int) -> None:
    layout = Layout(tp=2, dp=2, zero=zero, micro_batch=4, global_batch=8)
    compare(*train_both(four, layout, **LEARNING), 1e-5)


@pytest.mark.parametrize(
    "keys", [{"pa": True}, {"pa": True, "pa_cpu": True}, {"pa": True, "md": True}], ids=str
)
def test_partitioned_activations_agree_with_engine_native(four: RankPool, keys: dict[str, bool]) -> None:
    layout = replace(Layout(tp=2, dp=2, zero=2, micro_batch=2, global_batch=8, recompute=True), **keys)
    compare(*train_both(four, layout, **LEARNING), 1e-5)


@pytest.mark.parametrize(
    ("zero", "precision", "rtol"),
    [(1, "fp32", 1e-5), (2, "bf16", 4 * 2.0**-8), (3, "fp32", 1e-5), (3, "bf16", 4 * 2.0**-8)],
)
def test_offloaded_optimizer_preserves_parity(two: RankPool, zero: int, precision: str, rtol: float) -> None:
    """Gradients of several micro-batches accumulate in host memory."""
    layout = replace(PLAIN[zero], micro_batch=2, precision=precision, offload_optimizer=True)
    compare(*train_both(two, layout, **LEARNING), rtol)


@pytest.mark.parametrize("layout", [PLAIN[0], PLAIN[2]], ids=lambda layout: f"z{layout.zero}")
def test_norms_agree_without_clipping(two: RankPool, layout: Layout) -> None:
    compare(*train_both(two, layout, clip=0.0, **LEARNING), 1e-5)
