"""The shallow traces of every role of a layout, for micro-batches of so many samples."""

from __future__ import annotations

from repro.config import Layout, Model
from repro.simulate.plan.extrapolation.shallow_traces import (
    END_ROLES,
    MIDDLE_ROLES,
    LayoutFamily,
    family_of,
    trace_family,
)


def families_of(
    model: Model, layout: Layout, narrowest: int = 1, widest: int = 4
) -> tuple[dict[str, LayoutFamily], int]:
    """By role, and how many traces it took."""
    family = family_of(layout, model.heads, model.seq)
    ends, made = trace_family(model, model.seq, family, narrowest, widest, END_ROLES)
    if family.pp == 1:
        return ends, made
    middle, more = trace_family(model, model.seq, family, narrowest, widest, MIDDLE_ROLES)
    return ends | middle, made + more
