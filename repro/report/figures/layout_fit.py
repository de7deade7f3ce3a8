"""Figures of simulated layouts that fit their GPUs: maps of Yuan 1.0, and Turing-NLG by model-parallel degree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.report.figures.style import (
    BLUE,
    MUTED,
    ORANGE,
    SKY,
    VERMILION,
    Drawing,
    Record,
    make_axes,
    required_bytes,
    set_grid,
)
from repro.report.figures.values import View
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import basis_of_record, count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAP_SUITE, MAP_PREFIX = "yuan", "map-"
MAP_TITLE = "Which layouts of Yuan 1.0 fit its GPUs"
MAP_COMMAND = "repro run suites/yuan.toml --evidence simulated --only 'map-*'"
PUBLISHED_LAYOUT = (8, 38)
"""t and p of the published run, claim yuan-config."""
MapCells = dict[tuple[int, int], Record]
"""Record of each (t, p)."""


def draw_maps(records: list[Record]) -> Drawing:
    """Draw one panel per system of the `map-*` records, by ascending memory, with one cell per (t, p)."""
    shown = [
        record
        for record in records
        if (record.suite, record.evidence) == (MAP_SUITE, SIMULATED)
        and record.name.startswith(MAP_PREFIX)
        and record.conclusive
        and record.metrics.get("memory.limit_bytes")
    ]
    if not shown:
        return Drawing(
            "map",
            MAP_TITLE,
            "No simulated record of a map-* experiment.",
            (),
            MAP_COMMAND,
            evidence=SIMULATED,
        )
    panels: dict[str, MapCells] = {}
    for record in sorted(shown, key=_device_memory):
        panels.setdefault(record.experiment.system, {})[_tp_and_pp(record)] = record
    every = {place for cells in panels.values() for place in cells}
    figure, grid = make_axes(1.3 + 0.62 * len({t for t, _ in every}), 1, len(panels), squeeze=False)
    for axes, cells in zip(grid[0], panels.values(), strict=True):
        _draw_map(axes, cells, every)
    incomplete = len(panels) < 2 or any(set(cells) != every for cells in panels.values())
    drawn = [record for cells in panels.values() for record in cells.values()]
    return Drawing(
        "map",
        MAP_TITLE,
        _map_caption(drawn[0]),
        tuple(r.label for r in drawn),
        MAP_COMMAND if incomplete else "",
        figure,
        evidence=SIMULATED,
    )


def _tp_and_pp(record: Record) -> tuple[int, int]:
    layout = record.experiment.layout
    return layout.tp, layout.pp


def _device_memory(record: Record) -> float:
    on = record.simulated_on
    return (on.memory_bytes if on else None) or 0.0


def _draw_map(axes: Axes, cells: MapCells, every: set[tuple[int, int]]) -> None:
    """Draw the share of the device's memory by t and p, blue where the layout fits, and the required bytes as text."""
    import pandas as pd
    import seaborn as sns
    from matplotlib.patches import Rectangle

    rows = [(t, p, _memory_share(record), _cell_label(record)) for (t, p), record in cells.items()]
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
            elif (t, p) == PUBLISHED_LAYOUT:
                axes.add_patch(
                    Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, fill=False, edgecolor="black", lw=2.2)
                )
    axes.set_xticklabels([f"p = {p}" for p in stages])
    axes.set_yticklabels([f"t = {t}" for t in tensor[::-1]], rotation=0)
    axes.tick_params(length=0)
    record = next(iter(cells.values()))
    axes.set(xlabel="", ylabel="", title=f"{units.size(_device_memory(record))} ({record.experiment.system})")


def _memory_share(record: Record) -> float:
    """Return the required share of the device's memory, at least 1 without a fit, even if live bytes are fewer."""
    share = required_bytes(record) / _device_memory(record)
    return min(share, 0.999) if record.outcome == "ok" else max(share, 1.0)


def _cell_label(record: Record) -> str:
    fits = "fits" if record.outcome == "ok" else "does not fit"
    return f"{units.size(required_bytes(record))}\nd = {record.experiment.layout.dp}, {fits}"


def _map_caption(record: Record) -> str:
    layout, model = record.experiment.layout, record.experiment.model
    gpus = layout.dp * layout.tp * layout.pp
    return (
        f"Simulated, not measured: {model.name} on {gpus:,} GPUs with t tensor ranks, p pipeline stages and "
        f"d replicas, micro-batch {layout.micro_batch} of {layout.global_batch:,}, "
        f"{layout.precision}, activations recomputed, no ZeRO. Every (t, p) that divides layers and batch. "
        "Number and shade: what the fullest GPU gives to the allocator and to what it cannot see (CUDA, NCCL), as a "
        "share of its memory; blue fits. Where it does not fit, what is live instead of what is reserved. Frame: the "
        f"layout of the run, t = {PUBLISHED_LAYOUT[0]}, p = {PUBLISHED_LAYOUT[1]}. Which A100 it had is not published."
    )


DEGREES_ID, DEGREES_TITLE = "turing-degrees", "Turing-NLG 17B: which model-parallel degree fits a V100"
DEGREES_SUITE = "turing_nlg"
DEGREES_COMMAND = "repro run suites/turing_nlg.toml --evidence simulated --only '?[!w]*'"
SERIES = {"megatron-mp": ("Megatron-LM", ORANGE), "zero1-mp": ("with ZeRO 1", BLUE)}
MP_DEGREES = (16, 8, 4, 2, 1)
PUBLISHED_DEGREE_ROWS = {
    "megatron-mp": "tnlg-mp16-to-4/smallest MP that fits without ZeRO",
    "zero1-mp": "tnlg-mp16-to-4/smallest MP that fits with ZeRO 1",
}
MAX_HEIGHT_IN_MEMORIES = 2.2
"""Maximum of the vertical axis in memories of a GPU; a taller bar is cut and shows its number."""


def draw_degrees(view: View, simulated: list[Record]) -> Drawing:
    """Draw the required bytes per GPU by degree (left), and the samples in work on a node of 16 GPUs (right)."""
    found = {
        (prefix, degree): record
        for record in simulated
        if record.suite == DEGREES_SUITE and record.conclusive
        for prefix in SERIES
        for degree in MP_DEGREES
        if record.name == f"{prefix}{degree}" and record.metrics.get("memory.limit_bytes")
    }
    if not found:
        return Drawing(
            DEGREES_ID,
            DEGREES_TITLE,
            "No simulated record of Turing-NLG in the store.",
            (),
            DEGREES_COMMAND,
            evidence=SIMULATED,
        )
    figure, (left, right) = make_axes(3.7, 1, 2, width_ratios=[1.7, 1])
    whole = max(map(_total_memory, found.values()))
    _draw_memory(left, found, whole)
    _draw_samples(right, found)
    published = {prefix: view.row(name).row.printed for prefix, name in PUBLISHED_DEGREE_ROWS.items()}
    for number, (prefix, (_, colour)) in enumerate(SERIES.items()):
        printed = published[prefix]
        if printed is not None and printed.value in MP_DEGREES:
            at = (MP_DEGREES.index(int(printed.value)) + (number - 0.5) * 0.42, -0.02)
            left.annotate(
                "▲",
                at,
                (0, 0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="top",
                color=colour,
                fontsize=8,
                annotation_clip=False,
            )
    _draw_degrees_legend(figure, whole)
    missing = DEGREES_COMMAND if len(found) < len(SERIES) * len(MP_DEGREES) else ""
    return Drawing(
        DEGREES_ID,
        DEGREES_TITLE,
        _degrees_caption(found),
        tuple(sorted(r.label for r in found.values())),
        missing,
        figure,
        SIMULATED,
    )


DegreeRecords = dict[tuple[str, int], Record]


def _total_memory(record: Record) -> float:
    """Return the bytes of the device: the allocator's limit and the context."""
    return float(record.metrics["memory.limit_bytes"] + record.metrics["memory.context_bytes"])


def _draw_memory(axes: Axes, found: DegreeRecords, whole: float) -> None:
    top = MAX_HEIGHT_IN_MEMORIES * whole / units.GB
    for (prefix, degree), record in found.items():
        number = list(SERIES).index(prefix)
        x, size = MP_DEGREES.index(degree) + (number - 0.5) * 0.42, required_bytes(record) / units.GB
        fits, colour = record.outcome == "ok", SERIES[prefix][1]
        look: dict[str, Any] = {"color": colour, "lw": 0}
        if not fits:
            look = {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "lw": 0.9}
        axes.bar(x, min(size, top), 0.38, zorder=2, **look)
        words = f"{size:.0f}" if size < top else f"{size:.0f} ↑"
        inside = size >= 0.93 * top
        axes.annotate(
            words,
            (x, min(size, top)),
            (0, -3 if inside else 2),
            textcoords="offset points",
            ha="center",
            va="top" if inside else "bottom",
            fontsize=7.5,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8} if inside else None,
        )
    axes.axhline(whole / units.GB, color=VERMILION, lw=1.4, zorder=3)
    axes.set_ylim(0, top)
    _set_degree_axis(axes, "model-parallel degree (▲ published)", "GB per GPU, simulated")


def _draw_samples(axes: Axes, found: DegreeRecords) -> None:
    """Draw the replicas on a node times their micro-batch, at degrees that fit."""
    for (prefix, degree), record in found.items():
        if record.outcome != "ok":
            continue
        number = list(SERIES).index(prefix)
        x = MP_DEGREES.index(degree) + (number - 0.5) * 0.42
        gpus = int(record.simulated_on.devices_per_node or 1) if record.simulated_on else 1
        samples = gpus // degree * record.experiment.layout.micro_batch
        axes.bar(x, samples, 0.38, color=SERIES[prefix][1], lw=0, zorder=2)
        rate = record.metrics.get("hardware_flops_per_s.device")
        words = f"{samples}" + (f" ({rate / units.TERA:.0f} TF)" if rate else "")
        place: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "bottom",
            "rotation": 90,
        }
        axes.annotate(words, (x, samples), (0, 3), fontsize=7.5, **place)
    axes.set_ylim(0, 1.3 * max(axes.dataLim.y1, 1))
    _set_degree_axis(axes, "model-parallel degree", "samples at a time on a node")


def _set_degree_axis(axes: Axes, what: str, height: str) -> None:
    """Label the degrees and both axes."""
    axes.set_xlim(-0.55, len(MP_DEGREES) - 0.45)
    axes.set_xticks(range(len(MP_DEGREES)), [f"{degree}" for degree in MP_DEGREES])
    axes.tick_params(axis="x", length=0, pad=9)
    axes.set_xlabel(what)
    axes.set_ylabel(height)
    set_grid(axes, "y")


def _draw_degrees_legend(figure: Figure, whole: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in SERIES.values()]
    handles.append(Patch(facecolor="white", edgecolor=MUTED, hatch="//////", label="does not fit"))
    handles.append(Patch(facecolor=VERMILION, label=f"memory of the GPU, {units.size(whole)}"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4)


def _degrees_caption(found: DegreeRecords) -> str:
    record = next(iter(found.values()))
    layout = record.experiment.layout
    return (
        f"Simulated, not measured: {record.experiment.model.name} at micro-batch {layout.micro_batch}, "
        "activations recomputed. What the fullest GPU gives to the allocator and to what it cannot see; where the step "
        "does not fit, what is live. TF: predicted TFLOP/s per GPU. Claims: tnlg-mp16-to-4, tnlg-256-vs-1024. "
        f"{count_bases(map(basis_of_record, found.values()))}"
    )
