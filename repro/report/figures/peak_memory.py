"""Figures of memory by category: the peak of each measured experiment, and simulated memory over one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro.report.figures import style
from repro.report.figures.style import Drawing, Record
from repro.results.schema import SIMULATED
from repro.simulate.plan.closed_form import FRAGMENTATION
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PEAK = Drawing(
    "peak",
    "Peak memory of one step by category",
    "The results folder has no successful experiment.",
    missing="repro run suites/smoke.toml",
)
HOST_STYLE = {"facecolor": "none", "edgecolor": style.SKY, "hatch": "////", "lw": 0.6}
FRAGMENTATION_STYLE = {"facecolor": style.GRID, "edgecolor": style.MUTED, "hatch": "....", "lw": 0.4}
CATEGORY_STYLES: dict[str, Any] = style.CATEGORY_COLOURS | {
    FRAGMENTATION: FRAGMENTATION_STYLE,
    "host": HOST_STYLE,
}
LIMIT_LINE: dict[str, Any] = {"color": style.INK, "ls": "--", "lw": 1.2, "label": "limit of the allocator"}
RARE_CATEGORIES = ("checkpoints", FRAGMENTATION, "host")
"""Categories of memory that few layouts use; the legend of the figure of peaks lists them only if a bar has them."""
MAX_BARS = 40
"""Maximum number of experiments in the figure of memory peaks."""


def draw_peaks(records: list[Record]) -> Drawing:
    """Draw one panel per model and one bar per experiment: live bytes by category at the peak of the fullest rank."""
    ended = style.successful_records(records, "")
    every = [r for r in ended if style.has_memory_categories(r)]
    shown = sorted(every, key=lambda r: r.order, reverse=True)[:MAX_BARS]
    others = [r for r in ended if not style.has_memory_categories(r)]
    if not shown:
        return PEAK
    panels: dict[str, list[Record]] = {}
    for record in sorted(shown, key=_bar_order):
        panels.setdefault(record.experiment.model.name, []).append(record)
    models = sorted(panels, key=lambda name: (-len(panels[name]), name))
    heights = [len(panels[name]) + 2.0 for name in models]

    size = 0.6 + 0.205 * sum(heights), len(models), 1
    figure, grid = style.make_axes(*size, squeeze=False, height_ratios=heights)
    for axes, model in zip(grid[:, 0], models, strict=True):
        rows = panels[model]
        totals = [peak_of_fullest_rank(r)["total"] + peak_of_fullest_rank(r).get("host", 0) for r in rows]
        unit, scale = ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)
        for y, record in enumerate(rows):
            draw_memory_bar(axes, y, peak_of_fullest_rank(record), scale)
        axes.set_yticks(range(len(rows)), [r.name for r in rows], fontsize=8)
        axes.set(xlim=(0, 1.12 * max(totals) / scale), ylim=(len(rows) - 0.4, -0.6))
        axes.set(xlabel=f"{unit} on the fullest rank", title=model)
        style.set_grid(axes, "x")
    peaks = [peak_of_fullest_rank(r) for r in shown]
    used = {c for c in CATEGORY_STYLES if c not in RARE_CATEGORIES or any(peak.get(c, 0) for peak in peaks)}
    fills = {name: fill for name, fill in CATEGORY_STYLES.items() if name in used}
    style.draw_fills_above(figure, fills, ncols=len(fills))

    caption = (
        "Bytes of live tensors on the fullest rank at the memory peak of a step. Category 'other' is temporary memory "
        "of backward and the optimizer; 'host' is host memory, which the number does not include. Overhead of the "
        "allocator and memory of the process are not included."
    )
    if len(every) > len(shown):
        caption += f" Shown: the newest {len(shown)} of {len(every):,}; `repro export --table experiments` lists all."
    if others:
        engines = ", ".join(sorted({r.experiment.engine for r in others}))
        caption += f" Omitted: {len(others)} experiments of engine {engines}, without memory by category."
    return PEAK.drawn(figure, caption, (r.label for r in shown), missing=False)


def draw_memory_bar(
    axes: Axes, y: float, peak: Mapping[str, int], scale: float, limit: int | None = None
) -> None:
    """Draw a bar of bytes by category in units of `scale` bytes, with a line at `limit` and red bytes beyond it."""
    sizes = {category: count / scale for category, count in peak.items()}
    end = style.draw_stacked_bar(axes, y, sizes, CATEGORY_STYLES, 0.74, across=True)
    style.write_near(axes, units.size(peak["total"]), (end, y), (4, 0), va="center", fontsize=8)
    if limit is not None:
        axes.axvline(limit / scale, zorder=4, **LIMIT_LINE)
        axes.barh(y, max(0.0, end - limit / scale), 0.74, left=limit / scale, color=style.RED, lw=0, zorder=3)


def _bar_order(record: Record) -> tuple[str, int, int, int, str]:
    layout = record.experiment.layout
    return record.name.partition("-")[0], layout.tp, layout.dp, layout.zero, record.name


def peak_of_fullest_rank(record: Record) -> dict[str, int]:
    """Return the bytes by category, and in total, at the memory peak of the rank with the largest peak."""
    return max((rank.peak or {} for rank in record.memory_by_rank), key=lambda peak: peak.get("total", 0))


TIMELINE_ROWS = (
    tuple(f"zero_memory/7.5b-z{stage}-n64" for stage in range(4)),
    ("zero_r/fig6-c1-40b", "zero_r/fig7-c2-40b", "zero_r/fig7-c3-40b", "zero_r/fig7-c4-40b"),
)
TIMELINE_COMMANDS = (
    "repro run suites/zero_memory.toml --evidence simulated --rerun --only '7.5b-z*-n64'",
    "repro run suites/zero_r.toml --evidence simulated --rerun --only 'fig[67]-c?-40b'",
)
TIMELINES = Drawing(
    "memory-timeline",
    "Memory over one step by category",
    "The results folder has no simulated record with memory over time.",
    missing=" && ".join(TIMELINE_COMMANDS),
    evidence=SIMULATED,
)
MAX_HEIGHT_IN_LIMITS = 1.5
"""Maximum of a panel's vertical axis, as a multiple of the GPU's memory, if a curve exceeds twice this memory."""
MARKED_PHASES = ("forward", "backward", "optimizer")


def draw_timelines(simulated: list[Record]) -> Drawing:
    """Draw simulated memory by category over a training step, for the fullest pipeline stage of each layout."""
    records = {record.label: record for record in simulated if record.series.memory}
    rows = [[records.get(name) for name in row] for row in TIMELINE_ROWS]
    shown = [record for row in rows for record in row if record]
    missing = " && ".join(run for row, run in zip(rows, TIMELINE_COMMANDS, strict=True) if not all(row))
    if not shown:
        return TIMELINES
    rows = [row for row in rows if any(row)]
    size = 0.6 + 2.5 * len(rows), len(rows), len(TIMELINE_ROWS[0])
    figure, grid = style.make_axes(*size, squeeze=False, sharey="row", sharex=True)
    seen: set[str] = set()
    for row, line in zip(rows, grid, strict=True):
        for number, (record, axes) in enumerate(zip(row, line, strict=True)):
            if record is None:
                axes.set_visible(False)
                continue
            seen |= _draw_timeline(axes, record)
            if number == 0:
                axes.set_ylabel("live GPU memory (GB)")
        _set_row_height(line, row)
    for axes in grid[-1]:
        axes.set_xlabel("device's busy time")
    from matplotlib.lines import Line2D

    colours = {name: colour for name, colour in style.CATEGORY_COLOURS.items() if name in seen}
    limit = Line2D([], [], **LIMIT_LINE)
    style.draw_fills_above(figure, colours, limit, ncols=8, columnspacing=1.1)
    first = shown[0].experiment.model.name
    caption = (
        f"Simulated, not measured: every allocation of the real step, traced on shapes. Above: {first} under the "
        "stages of ZeRO on 64 GPUs. Below: 40B on 400 V100 under C1 to C4 of ZeRO-R (figure 7). Time: that of the "
        "device's operators without waits, in 96 intervals with their maxima. Dotted: begin of backward and optimizer."
    )
    return TIMELINES.drawn(figure, caption, (r.label for r in shown), missing=missing)


def gigabytes_by_category(record: Record) -> dict[str, list[float]]:
    """Return the device memory over a simulated step in GB: lists of equal length, one per memory category."""
    memory = record.series.memory or {}
    unit = memory["unit"] / units.GB
    size = max(len(row) for row in memory["bytes"].values())
    return {
        name: [unit * value for value in (row if len(row) > 1 else row * size)]
        for name, row in memory["bytes"].items()
        if name != "host"
    }


def _draw_timeline(axes: Axes, record: Record) -> set[str]:
    bytes_of = gigabytes_by_category(record)
    names = [name for name in style.CATEGORY_COLOURS if name in bytes_of]
    colours = [style.CATEGORY_COLOURS[name] for name in names]
    size = len(bytes_of[names[0]])
    places = [(number + 0.5) / size for number in range(size)]
    axes.stackplot(places, [bytes_of[name] for name in names], colors=colours, lw=0)
    if limit := record.metrics.get("memory.limit_bytes"):
        axes.axhline(limit / units.GB, **LIMIT_LINE)
    before = ""
    for part, name, _ in (record.series.memory or {})["phases"]:
        if name in MARKED_PHASES and name != before:
            if before:
                axes.axvline(part / size, color=style.INK, lw=0.7, ls=":")
            before = name
    axes.set(xlim=(0, 1), xticks=[])
    axes.tick_params(length=3)
    words = "" if record.outcome == "ok" else ", does not fit"
    in_stages = record.suite == "zero_memory"
    title = (
        style.STAGE_NAMES[record.experiment.layout.zero] if in_stages else record.name.split("-")[1].upper()
    )
    axes.set_title(f"{title}{words}", fontsize=8.5)
    return set(names)


def _set_row_height(line: Sequence[Axes], row: Sequence[Record | None]) -> None:
    """Fit the vertical axis of a row of panels to the memory curves; cut curves that exceed twice the GPU's memory."""
    curves = {number: gigabytes_by_category(r).values() for number, r in enumerate(row) if r}
    most = {number: max(map(sum, zip(*curve, strict=True))) for number, curve in curves.items()}
    limit = max(r.metrics.get("memory.limit_bytes", 0) / units.GB for r in row if r)
    top = 1.06 * max(limit, *most.values())
    if limit and top > 2 * limit:
        top = MAX_HEIGHT_IN_LIMITS * limit
        for number, value in most.items():
            if value > top:
                box = {"facecolor": "white", "lw": 0, "pad": 1.5}
                kw: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8, "bbox": box}
                words = f"maximum {units.number(value)} GB ↑"
                line[number].annotate(words, (0.5, 0.97), xycoords="axes fraction", **kw)
    line[0].set_ylim(0, top)
