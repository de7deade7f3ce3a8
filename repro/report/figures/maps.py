"""Which tensor-parallel degrees and pipeline stages of Yuan 1.0 fit its GPUs: one map a size of memory, simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.report.figures.style import (
    GREY,
    INK,
    MUTED,
    SKY,
    VERMILION,
    Drawing,
    Record,
    canvas,
    label,
)
from repro.results.schema import SIMULATED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUITE, PREFIX = "yuan", "map-"
TITLE = "Which layouts of Yuan 1.0 fit its GPUs"
RUN = "repro run suites/yuan.toml --evidence simulated --only 'map-*'"
PUBLISHED = (8, 38)
"""t and p of the run, claim yuan-config."""
Cells = dict[tuple[int, int], Record]
"""A record for each (t, p)."""


def draw(records: list[Record]) -> Drawing:
    """One panel for each system of the `map-*` records, least memory first; one field for each (t, p)."""
    shown = [
        record
        for record in records
        if (record.suite, record.evidence) == (SUITE, SIMULATED)
        and record.name.startswith(PREFIX)
        and record.conclusive
        and record.metrics.get("memory.limit_bytes")
    ]
    if not shown:
        return Drawing(
            "map", TITLE, "No simulated record of a map-* experiment.", (), RUN, evidence=SIMULATED
        )
    panels: dict[str, Cells] = {}
    for record in sorted(shown, key=_memory):
        panels.setdefault(record.experiment.system, {})[_place(record)] = record
    every = {place for cells in panels.values() for place in cells}
    tensor, stages = sorted({t for t, _ in every}), sorted({p for _, p in every})

    figure, grid = canvas(1.3 + 0.62 * len(tensor), 1, len(panels), squeeze=False)
    for axes, cells in zip(grid[0], panels.values(), strict=True):
        for (t, p), record in cells.items():
            _field(axes, stages.index(p), tensor.index(t), record, (t, p) == PUBLISHED)
        for x, p in enumerate(stages):
            for y, t in enumerate(tensor):
                if (t, p) not in every:
                    axes.text(x, y, "no such\nlayout", color=MUTED, ha="center", va="center", fontsize=7.5)
        _frame(axes, tensor, stages, next(iter(cells.values())))
    incomplete = len(panels) < 2 or any(set(cells) != every for cells in panels.values())
    drawn = [record for cells in panels.values() for record in cells.values()]
    return Drawing(
        "map",
        TITLE,
        _caption(drawn[0]),
        tuple(map(label, drawn)),
        RUN if incomplete else "",
        figure,
        evidence=SIMULATED,
    )


def _place(record: Record) -> tuple[int, int]:
    layout = record.experiment.layout
    return layout.tp, layout.pp


def _memory(record: Record) -> float:
    on = record.simulated_on
    return (on.memory_bytes if on else None) or 0.0


def needed(record: Record) -> float:
    """Bytes of the device that the layout takes: reserved and context, or live and context where it does not fit."""
    metrics = record.metrics
    reserved = metrics.get("memory.reserved_bytes", metrics["memory.peak_bytes"])
    return float(reserved + metrics["memory.context_bytes"])


def _field(axes: Axes, x: int, y: int, record: Record, published: bool) -> None:
    """One layout: what it takes in words, and as a bar of the device's memory."""
    from matplotlib.patches import Rectangle

    fits = record.outcome == "ok"
    share = needed(record) / _memory(record)
    edge: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.2} if published else {"edgecolor": "none"}
    face: dict[str, Any] = {"facecolor": SKY if fits else VERMILION, "alpha": 0.22}
    axes.add_patch(Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, zorder=1, linewidth=0, **face))
    axes.add_patch(Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, zorder=4, fill=False, **edge))
    width = 0.84 * min(1.0, share)
    axes.add_patch(Rectangle((x - 0.42, y - 0.37), 0.84, 0.13, zorder=2, facecolor="white", linewidth=0))
    hatch: dict[str, Any] = {} if fits else {"hatch": "/////", "edgecolor": "white"}
    colour = SKY if fits else VERMILION
    axes.add_patch(
        Rectangle((x - 0.42, y - 0.37), width, 0.13, zorder=3, facecolor=colour, linewidth=0, **hatch)
    )
    dp = record.experiment.layout.dp
    text: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 5}
    axes.text(x, y + 0.24, f"{needed(record) / 1e9:.1f} GB", weight="bold" if fits else "normal", **text)
    words = f"d = {dp}, {'fits' if fits else 'does not fit'}"
    axes.text(x, y - 0.04, words, fontsize=7.5, **text)


def _frame(axes: Axes, tensor: list[int], stages: list[int], record: Record) -> None:
    axes.set_xlim(-0.5, len(stages) - 0.5)
    axes.set_ylim(-0.5, len(tensor) - 0.5)
    axes.set_xticks(range(len(stages)), [f"p = {p}" for p in stages])
    axes.set_yticks(range(len(tensor)), [f"t = {t}" for t in tensor])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_color(GREY)
        side.set_visible(False)
    axes.set_title(f"{_memory(record) / 1e9:.1f} GB ({record.experiment.system})")


def _caption(record: Record) -> str:
    layout, model = record.experiment.layout, record.experiment.model
    gpus = layout.dp * layout.tp * layout.pp
    return (
        f"Simulated, not measured: {model.name} on {gpus:,} GPUs with t tensor ranks, p pipeline stages and "
        f"d replicas, micro-batch {layout.micro_batch} of {layout.global_batch:,}, "
        f"{layout.precision}, activations recomputed, no ZeRO. Every (t, p) that divides layers and batch. "
        "Number and bar: what the fullest GPU gives to the allocator and to what it cannot see (CUDA, NCCL), as a "
        "share of its memory; where it does not fit, what is live instead of what is reserved. Frame: the layout "
        f"of the run, t = {PUBLISHED[0]}, p = {PUBLISHED[1]}. Which A100 it had is not published."
    )
