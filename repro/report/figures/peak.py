"""Peak memory of one step by category, for every experiment."""

from __future__ import annotations

from typing import Any

from repro.report.figures.style import CATEGORY, Drawing, Record, accounted, canvas, quiet, stacked
from repro.util import units

TITLE = "Peak memory of one step by category"
RUN = "repro run suites/smoke.toml"
OUTLINE: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": CATEGORY["host"],
    "hatch": "////",
    "linewidth": 0.6,
}
LOOK: dict[str, Any] = CATEGORY | {"host": OUTLINE}
LATER = ("checkpoints", "host")
"""Categories that few layouts have: in the legend where a bar shows them."""
MOST = 40
"""Bars; more are no picture."""


def draw(records: list[Record]) -> Drawing:
    """One panel a model, one bar an experiment: what was live when the fullest rank held most."""
    every = [r for r in records if r.outcome == "ok" and accounted(r)]
    shown = sorted(every, key=lambda r: r.order, reverse=True)[:MOST]
    others = [r for r in records if r.outcome == "ok" and not accounted(r)]
    if not shown:
        return Drawing("peak", TITLE, "No experiment in the store that ended ok.", (), RUN)
    panels: dict[str, list[Record]] = {}
    for record in sorted(shown, key=_order):
        panels.setdefault(record.experiment.model.name, []).append(record)
    models = sorted(panels, key=lambda name: (-len(panels[name]), name))
    heights = [len(panels[name]) + 2.0 for name in models]

    figure, grid = canvas(0.6 + 0.205 * sum(heights), len(models), 1, squeeze=False, height_ratios=heights)
    for axes, model in zip(grid[:, 0], models, strict=True):
        rows = panels[model]
        totals = [fullest(r)["total"] + fullest(r).get("host", 0) for r in rows]
        unit, scale = ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)
        for y, record in enumerate(rows):
            peak = fullest(record)
            sizes = {category: count / scale for category, count in peak.items()}
            base = stacked(axes, y, sizes, LOOK, 0.74, across=True)
            axes.annotate(
                units.size(peak["total"]),
                (base, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(rows)), [r.name for r in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.12 * max(totals) / scale)
        axes.set_xlabel(f"{unit} on the fullest rank")
        axes.set_title(model)
        quiet(axes, "x")
    from matplotlib.patches import Patch

    seen = [c for c in CATEGORY if c not in LATER or any(fullest(r).get(c, 0) for r in shown)]
    handles = [Patch(**(OUTLINE if c == "host" else {"color": CATEGORY[c]}), label=c) for c in seen]
    figure.legend(handles=handles, ncols=len(handles), loc="outside upper center")

    caption = (
        "Bytes of live tensor storages at the moment of one step when the rank that needs most held most. "
        "Category 'other' is what backward and the optimizer allocate for a moment; 'host', where there is "
        "any, is in host memory and not in the number. The allocator's "
        "overhead and the process itself are not in it; the table gives the resident size."
    )
    if len(every) > len(shown):
        caption += f" The newest {len(shown)} of {len(every):,}; `repro export --table experiments` has all."
    if others:
        engines = ", ".join(sorted({r.experiment.engine for r in others}))
        caption += (
            f" Left out: {len(others)} experiments of engine {engines}, of whose memory the total and the model "
            "states alone are known."
        )
    return Drawing("peak", TITLE, caption, tuple(r.at for r in shown), "", figure)


def _order(record: Record) -> tuple[str, int, int, int, str]:
    layout = record.experiment.layout
    return record.name.partition("-")[0], layout.tp, layout.dp, layout.zero, record.name


def fullest(record: Record) -> dict[str, int]:
    """Bytes by category, and their total, on the rank whose peak is largest."""
    return max((held.peak or {} for held in record.memory_by_rank), key=lambda peak: peak.get("total", 0))
