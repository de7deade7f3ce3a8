"""Turing-NLG at every model-parallel degree: what a GPU would need with and without ZeRO, and where it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.report.figures.style import BLUE, MUTED, ORANGE, VERMILION, Drawing, Record, canvas, needed, quiet
from repro.report.figures.values import View
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import basis_of_record, count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ID, TITLE = "turing-degrees", "Turing-NLG 17B: which model-parallel degree fits a V100"
SUITE = "turing_nlg"
RUN = "repro run suites/turing_nlg.toml --evidence simulated --only '?[!w]*'"
SYSTEMS = {"megatron-mp": ("Megatron-LM", ORANGE), "zero1-mp": ("with ZeRO 1", BLUE)}
DEGREES = (16, 8, 4, 2, 1)
ROWS = {
    "megatron-mp": "tnlg-mp16-to-4/smallest MP that fits without ZeRO",
    "zero1-mp": "tnlg-mp16-to-4/smallest MP that fits with ZeRO 1",
}
TOP = 2.2
"""Of the axis, in memories of a GPU; a taller bar is cut and says its number."""


def draw(view: View, simulated: list[Record]) -> Drawing:
    """Left: bytes a GPU needs at each degree.  Right: samples in work on a node of 16 GPUs where it fits."""
    found = {
        (prefix, degree): record
        for record in simulated
        if record.suite == SUITE and record.conclusive
        for prefix in SYSTEMS
        for degree in DEGREES
        if record.name == f"{prefix}{degree}" and record.metrics.get("memory.limit_bytes")
    }
    if not found:
        return Drawing(
            ID, TITLE, "No simulated record of Turing-NLG in the store.", (), RUN, evidence=SIMULATED
        )
    figure, (left, right) = canvas(3.7, 1, 2, width_ratios=[1.7, 1])
    whole = max(map(_whole, found.values()))
    _memory(left, found, whole)
    _node(right, found)
    published = {prefix: view.row(name).row.printed for prefix, name in ROWS.items()}
    for number, (prefix, (_, colour)) in enumerate(SYSTEMS.items()):
        printed = published[prefix]
        if printed is not None and printed.value in DEGREES:
            at = (DEGREES.index(int(printed.value)) + (number - 0.5) * 0.42, -0.02)
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
    _legend(figure, whole)
    missing = RUN if len(found) < len(SYSTEMS) * len(DEGREES) else ""
    return Drawing(
        ID, TITLE, _caption(found), tuple(sorted(r.at for r in found.values())), missing, figure, SIMULATED
    )


Found = dict[tuple[str, int], Record]


def _whole(record: Record) -> float:
    """Bytes of the device: what the allocator may have, and what it cannot see."""
    return float(record.metrics["memory.limit_bytes"] + record.metrics["memory.context_bytes"])


def _memory(axes: Axes, found: Found, whole: float) -> None:
    top = TOP * whole / units.GB
    for (prefix, degree), record in found.items():
        number = list(SYSTEMS).index(prefix)
        x, size = DEGREES.index(degree) + (number - 0.5) * 0.42, needed(record) / units.GB
        fits, colour = record.outcome == "ok", SYSTEMS[prefix][1]
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
    _across(axes, "model-parallel degree (▲ published)", "GB per GPU, simulated")


def _node(axes: Axes, found: Found) -> None:
    """Replicas of a node by their micro-batch, at degrees that fit."""
    for (prefix, degree), record in found.items():
        if record.outcome != "ok":
            continue
        number = list(SYSTEMS).index(prefix)
        x = DEGREES.index(degree) + (number - 0.5) * 0.42
        gpus = int(record.simulated_on.devices_per_node or 1) if record.simulated_on else 1
        samples = gpus // degree * record.experiment.layout.micro_batch
        axes.bar(x, samples, 0.38, color=SYSTEMS[prefix][1], lw=0, zorder=2)
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
    _across(axes, "model-parallel degree", "samples at a time on a node")


def _across(axes: Axes, what: str, height: str) -> None:
    """The degrees, and what both axes are."""
    axes.set_xlim(-0.55, len(DEGREES) - 0.45)
    axes.set_xticks(range(len(DEGREES)), [f"{degree}" for degree in DEGREES])
    axes.tick_params(axis="x", length=0, pad=9)
    axes.set_xlabel(what)
    axes.set_ylabel(height)
    quiet(axes, "y")


def _legend(figure: Figure, whole: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in SYSTEMS.values()]
    handles.append(Patch(facecolor="white", edgecolor=MUTED, hatch="//////", label="does not fit"))
    handles.append(Patch(facecolor=VERMILION, label=f"memory of the GPU, {units.size(whole)}"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4)


def _caption(found: Found) -> str:
    record = next(iter(found.values()))
    layout = record.experiment.layout
    return (
        f"Simulated, not measured: {record.experiment.model.name} at micro-batch {layout.micro_batch}, "
        "activations recomputed. What the fullest GPU gives to the allocator and to what it cannot see; where the step "
        "does not fit, what is live. TF: predicted TFLOP/s per GPU. Claims: tnlg-mp16-to-4, tnlg-256-vs-1024. "
        f"{count_bases(map(basis_of_record, found.values()))}"
    )
