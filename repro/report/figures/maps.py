"""Which tensor-parallel degrees and pipeline stages of Yuan 1.0 fit its GPUs: one map a size of memory, simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.report.figures.style import MUTED, SKY, VERMILION, Drawing, Record, canvas, needed
from repro.results.schema import SIMULATED
from repro.util import units

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
    figure, grid = canvas(1.3 + 0.62 * len({t for t, _ in every}), 1, len(panels), squeeze=False)
    for axes, cells in zip(grid[0], panels.values(), strict=True):
        _map(axes, cells, every)
    incomplete = len(panels) < 2 or any(set(cells) != every for cells in panels.values())
    drawn = [record for cells in panels.values() for record in cells.values()]
    return Drawing(
        "map",
        TITLE,
        _caption(drawn[0]),
        tuple(r.at for r in drawn),
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


def _map(axes: Axes, cells: Cells, every: set[tuple[int, int]]) -> None:
    """Share of the device's memory by t and p, blue where it fits; in words what it takes, and where there is none."""
    import pandas as pd
    import seaborn as sns
    from matplotlib.patches import Rectangle

    rows = [(t, p, _share(record), _words(record)) for (t, p), record in cells.items()]
    frame = pd.DataFrame(rows, columns=["t", "p", "share", "words"])
    tensor, stages = (sorted({place[axis] for place in every}) for axis in (0, 1))
    shares, words = (
        frame.pivot(index="t", columns="p", values=name).reindex(index=tensor[::-1], columns=stages)
        for name in ("share", "words")
    )
    colours = [*sns.light_palette(SKY, 9)[1:6], *sns.light_palette(VERMILION, 9)[1:6]]
    look = {"annot_kws": {"color": "black", "fontsize": 8}, "linewidths": 3, "cbar": False}
    sns.heatmap(shares, annot=words, fmt="", vmin=0, vmax=2, cmap=colours, ax=axes, **look)
    for x, p in enumerate(stages):
        for y, t in enumerate(tensor[::-1]):
            if (t, p) not in every:
                axes.text(
                    x + 0.5, y + 0.5, "no such\nlayout", color=MUTED, ha="center", va="center", fontsize=7.5
                )
            elif (t, p) == PUBLISHED:
                axes.add_patch(
                    Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, fill=False, edgecolor="black", lw=2.2)
                )
    axes.set_xticklabels([f"p = {p}" for p in stages])
    axes.set_yticklabels([f"t = {t}" for t in tensor[::-1]], rotation=0)
    axes.tick_params(length=0)
    record = next(iter(cells.values()))
    axes.set(xlabel="", ylabel="", title=f"{units.size(_memory(record))} ({record.experiment.system})")


def _share(record: Record) -> float:
    """Of the device's memory; at least 1 where it does not fit, though what is live may be less than all of it."""
    share = needed(record) / _memory(record)
    return min(share, 0.999) if record.outcome == "ok" else max(share, 1.0)


def _words(record: Record) -> str:
    fits = "fits" if record.outcome == "ok" else "does not fit"
    return f"{units.size(needed(record))}\nd = {record.experiment.layout.dp}, {fits}"


def _caption(record: Record) -> str:
    layout, model = record.experiment.layout, record.experiment.model
    gpus = layout.dp * layout.tp * layout.pp
    return (
        f"Simulated, not measured: {model.name} on {gpus:,} GPUs with t tensor ranks, p pipeline stages and "
        f"d replicas, micro-batch {layout.micro_batch} of {layout.global_batch:,}, "
        f"{layout.precision}, activations recomputed, no ZeRO. Every (t, p) that divides layers and batch. "
        "Number and shade: what the fullest GPU gives to the allocator and to what it cannot see (CUDA, NCCL), as a "
        "share of its memory; blue fits. Where it does not fit, what is live instead of what is reserved. Frame: the "
        f"layout of the run, t = {PUBLISHED[0]}, p = {PUBLISHED[1]}. Which A100 it had is not published."
    )
