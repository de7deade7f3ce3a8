"""Which models a layout can spread: what must divide what."""

from __future__ import annotations

from repro.config.errors import require
from repro.config.layout import Layout
from repro.config.model import Model
from repro.config.operator_set import OperatorSet


def check(layout: Layout, model: Model) -> None:
    """Raise `ConfigError` that names the layout's key if `model` cannot be spread this way."""
    for key, what in (("heads", "heads"), ("ffn_width", "ffn"), ("vocab", "vocab")):
        size = getattr(model, key)
        require(size % layout.tp == 0, "tp", layout.tp, f"a divisor of {what} = {size} ({model.name})")
    keys = model.key_heads
    what = f"a divisor or a multiple of kv_heads = {keys} ({model.name})"
    require(keys % layout.tp == 0 or layout.tp % keys == 0, "tp", layout.tp, what)
    other = next(iter(model.departures()), "")
    later = ", ".join(each for each in OperatorSet if each is not OperatorSet.UNFUSED)
    what = f"one of {later}: the software of 2019 has no {other} = {getattr(model, other, '')}"
    require(not other or layout.kernels is not OperatorSet.UNFUSED, "kernels", layout.kernels, what)
    require(
        not layout.sp or model.seq % layout.tp == 0,
        "sp",
        layout.sp,
        says=f"needs tp = {layout.tp} to divide seq = {model.seq} ({model.name})",
    )
    parts = layout.pp * layout.chunks
    what = f"layers = {model.layers} ({model.name})"
    times = f"pp * chunks = {parts} must be " if layout.chunks > 1 else "must be "
    if layout.stage_layers:
        total = sum(layout.stage_layers)
        require(
            total == model.layers,
            "stage_layers",
            list(layout.stage_layers),
            f"numbers that add up to {what}, not {total}",
        )
        return
    require(parts <= model.layers, "pp", layout.pp, says=f"{times}at most {what}")
    require(
        model.layers % parts == 0,
        "pp",
        layout.pp,
        says=f"{times}a divisor of {what}, or stage_layers with {parts} numbers that add up to it",
    )
