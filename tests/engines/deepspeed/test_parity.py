"""Parity tests: DeepSpeed and engine native have equal losses, norms and parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout, Model
from tests.engines.needs import needs
from tests.engines.runs import pool_of
from tests.parallel.test_architectures import FAMILIES
from tests.training import LEARNING, Trained, smallest, tiny, train

pytestmark = needs("deepspeed")

PLAIN = [Layout(dp=2, zero=zero, micro_batch=4, global_batch=8) for zero in range(4)]
TP_DP = Layout(tp=2, dp=2, micro_batch=4, global_batch=8)
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
    request: pytest.FixtureRequest, layout: Layout, model: Model | None = None, **training: Any
) -> tuple[list[Trained], list[Trained]]:
    """Return the results of all ranks in DeepSpeed and in engine native."""
    pool, model = pool_of(request, layout), model or smallest(layout)
    plain = replace(layout, offload_optimizer=False)
    theirs, ours = (
        pool.run(train, tiny(used, model, engine, **training))
        for used, engine in ((layout, "deepspeed"), (plain, "native"))
    )
    assert ours[0].loss[-1] < 0.9 * ours[0].loss[0], "the loss must fall, or parity proves little"
    return theirs, ours


FP32: dict[str, tuple[Layout, dict[str, Any]]] = {
    **{f"z{layout.zero}-20-steps": (layout, {}) for layout in PLAIN},
    **{name: (layout, LEARNING) for name, layout in VARIED.items()},
    "llama-z3": (PLAIN[3], {"model": FAMILIES["llama"], **LEARNING}),
    "bloom-z3": (VARIED["z3-accumulate"], {"model": FAMILIES["bloom"], **LEARNING}),
    "falcon-z2": (PLAIN[2], {"model": FAMILIES["falcon"], **LEARNING}),
    "llama-tp2-z1": (Layout(tp=2, zero=1, micro_batch=8), {"model": FAMILIES["llama"], **LEARNING}),
    **{f"tp2-dp2-z{zero}": (replace(TP_DP, zero=zero), LEARNING) for zero in range(4)},
    "pa": (replace(TP_DP, zero=2, micro_batch=2, recompute=True, pa=True), LEARNING),
    "pa-cpu": (replace(TP_DP, zero=2, micro_batch=2, recompute=True, pa=True, pa_cpu=True), LEARNING),
    "pa-md": (replace(TP_DP, zero=2, micro_batch=2, recompute=True, pa=True, md=True), LEARNING),
    **{f"no-clipping-z{zero}": (PLAIN[zero], {"clip": 0.0, **LEARNING}) for zero in (0, 2)},
}
"""Layouts, and keyword arguments of `train_both`."""


@pytest.mark.parametrize("name", FP32)
def test_fp32_training_agrees_with_engine_native(request: pytest.FixtureRequest, name: str) -> None:
    layout, training = FP32[name]
    compare(*train_both(request, layout, **training), 1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("zero", range(4))
def test_mixed_precision_agrees_within_rounding(
    request: pytest.FixtureRequest, zero: int, precision: str
) -> None:
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    layout = replace(PLAIN[zero], precision=precision)
    # Stage 0 sums gradients before it divides by dp, so that half the scale overflows: use a small scale.
    compare(*train_both(request, layout, loss_scale=2.0**12, **LEARNING), 4 * unit)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_loss_scales_and_skipped_steps_agree(request: pytest.FixtureRequest, zero: int) -> None:
    """The first steps overflow; with hysteresis, both engines skip the same steps."""
    rules = {"loss_scale": 2.0**22, "steps": 20, "lr": 6e-3}
    theirs, ours = train_both(request, replace(PLAIN[zero], precision="fp16"), **rules)
    assert len(ours[0].skipped) > 3
    assert theirs[0].skipped == ours[0].skipped
    assert theirs[0].scale == ours[0].scale


@pytest.mark.parametrize(
    ("zero", "precision", "rtol"),
    [(1, "fp32", 1e-5), (2, "bf16", 4 * 2.0**-8), (3, "fp32", 1e-5), (3, "bf16", 4 * 2.0**-8)],
)
def test_offloaded_optimizer_preserves_parity(
    request: pytest.FixtureRequest, zero: int, precision: str, rtol: float
) -> None:
    """Gradients of several micro-batches accumulate in host memory."""
    layout = replace(PLAIN[zero], micro_batch=2, precision=precision, offload_optimizer=True)
    compare(*train_both(request, layout, **LEARNING), rtol)
