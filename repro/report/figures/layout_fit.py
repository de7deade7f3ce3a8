"""Figures of simulated layouts that fit into GPU memory: maps of Yuan 1.0, and Turing-NLG by model-parallel degree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.report.figures import style
from repro.report.figures.style import Drawing, Record
from repro.report.figures.values import View
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import basis_of_record, count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAP = Drawing(
    "map",
    "Which layouts of Yuan 1.0 fit its GPUs",
    "The results folder has no simulation of the experiments map-*.",
    missing="repro run suites/yuan.toml --evidence simulated --only 'map-*'",
    evidence=SIMULATED,
)
PUBLISHED_LAYOUT = (8, 38)
"""Tensor-parallel degree t and pipeline stages p of Yuan's published run (claim yuan-config)."""
MapCells = dict[tuple[int, int], Record]
"""Simulated record of each layout (t, p): tensor-parallel degree t and number p of pipeline stages."""


def draw_maps(records: list[Record]) -> Drawing:
    """Draw which layouts of Yuan 1.0 fit into GPU memory: a panel per system, a cell per tensor and pipeline degree."""
    maps = [r for r in records if r.evidence == SIMULATED and r.label.startswith("yuan/map-")]
    shown = [r for r in maps if r.conclusive and r.metrics.get("memory.limit_bytes")]
    if not shown:
        return MAP
    panels: dict[str, MapCells] = {}
    for record in sorted(shown, key=_device_memory):
        layout = record.experiment.layout
        panels.setdefault(record.experiment.system, {})[layout.tp, layout.pp] = record
    every = {place for cells in panels.values() for place in cells}
    figure, grid = style.make_axes(1.3 + 0.62 * len({t for t, _ in every}), 1, len(panels), squeeze=False)
    for axes, cells in zip(grid[0], panels.values(), strict=True):
        _draw_map(axes, cells, every)
    incomplete = len(panels) < 2 or any(set(cells) != every for cells in panels.values())
    drawn = [record for cells in panels.values() for record in cells.values()]
    return MAP.drawn(figure, _map_caption(drawn[0]), (r.label for r in drawn), missing=incomplete)


def _device_memory(record: Record) -> float:
    on = record.simulated_on
    return (on.memory_bytes if on else None) or 0.0


def _draw_map(axes: Axes, cells: MapCells, every: set[tuple[int, int]]) -> None:
    """Draw layouts by tensor degree t and pipeline degree p: colours are shares of device memory, texts are bytes."""
    import pandas as pd
    import seaborn as sns
    from matplotlib.patches import Rectangle

    rows = [(t, p, _memory_share(record), _cell_label(record)) for (t, p), record in cells.items()]
    frame = pd.DataFrame(rows, columns=["t", "p", "share", "label"])
    tensor, stages = (sorted({place[axis] for place in every}) for axis in (0, 1))
    grid = frame.pivot(index="t", columns="p").reindex(index=tensor[::-1])
    shares, labels = (grid[name].reindex(columns=stages) for name in ("share", "label"))
    colours = [*sns.light_palette(style.SKY, 9)[1:6], *sns.light_palette(style.VERMILION, 9)[1:6]]
    kw = {"annot_kws": {"color": "black", "fontsize": 8}, "linewidths": 3, "cbar": False}
    sns.heatmap(shares, annot=labels, fmt="", vmin=0, vmax=2, cmap=colours, ax=axes, **kw)
    for x, p in enumerate(stages):
        for y, t in enumerate(tensor[::-1]):
            if (t, p) not in every:
                words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
                axes.text(x + 0.5, y + 0.5, "no such\nlayout", color=style.MUTED, **words)
            elif (t, p) == PUBLISHED_LAYOUT:
                frame_look: dict[str, Any] = {"fill": False, "edgecolor": "black", "lw": 2.2}
                axes.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, **frame_look))
    axes.set_xticklabels([f"p = {p}" for p in stages])
    axes.set_yticklabels([f"t = {t}" for t in tensor[::-1]], rotation=0)
    axes.tick_params(length=0)
    record = next(iter(cells.values()))
    axes.set(xlabel="", ylabel="", title=f"{units.size(_device_memory(record))} ({record.experiment.system})")


def _memory_share(record: Record) -> float:
    """Return the share of device memory that a simulated layout requires: below 1 if it fits, else 1 or more."""
    share = style.required_bytes(record) / _device_memory(record)
    return min(share, 0.999) if record.outcome == "ok" else max(share, 1.0)


def _cell_label(record: Record) -> str:
    fits = "fits" if record.outcome == "ok" else "does not fit"
    return f"{units.size(style.required_bytes(record))}\nd = {record.experiment.layout.dp}, {fits}"


def _map_caption(record: Record) -> str:
    layout, model = record.experiment.layout, record.experiment.model
    gpus = layout.dp * layout.tp * layout.pp
    return (
        f"Simulated, not measured: {model.name} on {gpus:,} GPUs with t tensor ranks, p pipeline stages and "
        f"d replicas, micro-batch {layout.micro_batch} of {layout.global_batch:,}, "
        f"{layout.precision}, activations recomputed, no ZeRO. All (t, p) that divide layers and batch. "
        "Number: reserved memory of the fullest GPU with CUDA and NCCL, or live memory if the layout does not fit. "
        "Shade: share of the device memory; blue fits. Frame: the "
        f"published layout, t = {PUBLISHED_LAYOUT[0]}, p = {PUBLISHED_LAYOUT[1]}; its kind of A100 is not published."
    )


DEGREES = Drawing(
    "turing-degrees",
    "Turing-NLG 17B: which model-parallel degree fits a V100",
    "The results folder has no simulation of Turing-NLG.",
    missing="repro run suites/turing_nlg.toml --evidence simulated --only '?[!w]*'",
    evidence=SIMULATED,
)
SERIES = {"megatron-mp": ("Megatron-LM", style.ORANGE), "zero1-mp": ("with ZeRO 1", style.BLUE)}
MP_DEGREES = (16, 8, 4, 2, 1)
PUBLISHED_DEGREE_ROWS = {
    "megatron-mp": "tnlg-mp16-to-4/smallest MP that fits without ZeRO",
    "zero1-mp": "tnlg-mp16-to-4/smallest MP that fits with ZeRO 1",
}
MAX_HEIGHT_IN_MEMORIES = 2.2
"""Maximum of the vertical axis, as a multiple of a GPU's memory; taller bars are cut and labelled with their value."""


def draw_degrees(view: View, simulated: list[Record]) -> Drawing:
    """Draw required bytes per GPU (left) and samples per node and micro-batch (right), by model-parallel degree."""
    simulations = {r.label: r for r in simulated if r.conclusive and r.metrics.get("memory.limit_bytes")}
    found = {
        (prefix, degree): simulations[label]
        for prefix in SERIES
        for degree in MP_DEGREES
        if (label := f"turing_nlg/{prefix}{degree}") in simulations
    }
    if not found:
        return DEGREES
    figure, (left, right) = style.make_axes(3.7, 1, 2, width_ratios=[1.7, 1])
    metrics = [record.metrics for record in found.values()]
    memory = max(float(m["memory.limit_bytes"] + m["memory.context_bytes"]) for m in metrics)
    _draw_memory(left, found, memory)
    _draw_samples(right, found)
    kw: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top", "fontsize": 8}
    for prefix, (_, colour) in SERIES.items():
        printed = view.row(PUBLISHED_DEGREE_ROWS[prefix]).row.printed
        if printed is not None and printed.value in MP_DEGREES:
            at = (_bar_position(prefix, int(printed.value)), -0.02)
            style.write_near(left, "▲", at, (0, 0), color=colour, annotation_clip=False, **kw)
    _draw_degrees_legend(figure, memory)
    missing = len(found) < len(SERIES) * len(MP_DEGREES)
    runs = sorted(r.label for r in found.values())
    return DEGREES.drawn(figure, _degrees_caption(found), runs, missing=missing)


DegreeRecords = dict[tuple[str, int], Record]


def _bar_position(prefix: str, degree: int) -> float:
    return MP_DEGREES.index(degree) + (list(SERIES).index(prefix) - 0.5) * 0.42


def _draw_memory(axes: Axes, found: DegreeRecords, memory: float) -> None:
    top = MAX_HEIGHT_IN_MEMORIES * memory / units.GB
    for (prefix, degree), record in found.items():
        x, colour = _bar_position(prefix, degree), SERIES[prefix][1]
        size = style.required_bytes(record) / units.GB
        kw: dict[str, Any] = {"color": colour, "lw": 0}
        if record.outcome != "ok":
            kw = {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "lw": 0.9}
        axes.bar(x, min(size, top), 0.38, zorder=2, **kw)
        words = f"{size:.0f}" if size < top else f"{size:.0f} ↑"
        offset: tuple[int, int] = (0, 2)
        place: dict[str, Any] = {"va": "bottom"}
        if size >= 0.93 * top:  # The label of a bar that reaches the top of the axis is inside the bar.
            offset, place = (0, -3), {"va": "top", "bbox": {"facecolor": "white", "linewidth": 0, "pad": 0.8}}
        style.write_near(axes, words, (x, min(size, top)), offset, ha="center", fontsize=7.5, **place)
    axes.axhline(memory / units.GB, color=style.VERMILION, lw=1.4, zorder=3)
    axes.set_ylim(0, top)
    _set_degree_axis(axes, "model-parallel degree (▲ published)", "GB per GPU, simulated")


def _draw_samples(axes: Axes, found: DegreeRecords) -> None:
    """Draw the samples that a node processes at once, replicas times micro-batch, for the layouts that fit."""
    for (prefix, degree), record in found.items():
        if record.outcome != "ok":
            continue
        x = _bar_position(prefix, degree)
        gpus = int(record.simulated_on.devices_per_node or 1) if record.simulated_on else 1
        samples = gpus // degree * record.experiment.layout.micro_batch
        axes.bar(x, samples, 0.38, color=SERIES[prefix][1], lw=0, zorder=2)
        rate = record.metrics.get("hardware_flops_per_s.device")
        words = f"{samples}" + (f" ({rate / units.TERA:.0f} TF)" if rate else "")
        place: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90}
        style.write_near(axes, words, (x, samples), (0, 3), fontsize=7.5, **place)
    axes.set_ylim(0, 1.3 * max(axes.dataLim.y1, 1))
    _set_degree_axis(axes, "model-parallel degree", "samples per node and micro-batch")


def _set_degree_axis(axes: Axes, what: str, height: str) -> None:
    """Label both axes of a panel, and the model-parallel degrees on the horizontal axis."""
    axes.set(xlabel=what, ylabel=height, xlim=(-0.55, len(MP_DEGREES) - 0.45))
    axes.set_xticks(range(len(MP_DEGREES)), [f"{degree}" for degree in MP_DEGREES])
    axes.tick_params(axis="x", length=0, pad=9)
    style.set_grid(axes, "y")


def _draw_degrees_legend(figure: Figure, memory: float) -> None:
    from matplotlib.patches import Patch

    misfit = Patch(facecolor="white", edgecolor=style.MUTED, hatch="//////", label="does not fit")
    limit = Patch(facecolor=style.VERMILION, label=f"memory of the GPU, {units.size(memory)}")
    style.draw_fills_above(figure, dict(SERIES.values()), misfit, limit, ncols=4)


def _degrees_caption(found: DegreeRecords) -> str:
    record = next(iter(found.values()))
    layout = record.experiment.layout
    return (
        f"Simulated, not measured: {record.experiment.model.name} at micro-batch {layout.micro_batch}, "
        "activations recomputed. Bars: reserved memory of the fullest GPU with CUDA and NCCL, or live memory if the "
        "step does not fit. TF: predicted TFLOP/s per GPU. Claims: tnlg-mp16-to-4, tnlg-256-vs-1024. "
        f"{count_bases(map(basis_of_record, found.values()))}"
    )
