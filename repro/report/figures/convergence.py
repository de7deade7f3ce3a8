"""Loss curves of a long training under every layout, and how far each strays beside what rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Drawing,
    Record,
    canvas,
    quiet,
    succeeded,
)
from repro.results.curves import ROUNDING, distances, root_mean_square

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUITE, REFERENCE = "convergence", "fp32"
CONTROL, FAULT, SEED, BATCH = "order-", "fault-", "seed-", "batch-"
TITLE = "One loss curve under every layout"
RUN = "repro run suites/convergence.toml"
SMOOTH = 10
"""Steps whose distances are drawn as one point: those of single steps cross zero."""
FAULTS = {"fault-rate": "rate + 0.01 %", "fault-decay": "no weight decay", "fault-clip": "norm - 1 %"}
LAYOUTS = {
    "data parallel, ZeRO 1-3": BLUE,
    "tensor parallel": ORANGE,
    "pipelines": GREEN,
    "two of these": PURPLE,
    "DeepSpeed": VERMILION,
}
PRECISIONS = {"fp16": VERMILION, "bf16": BLUE}


def draw(records: Sequence[Record]) -> Drawing:
    """Left: loss.  Middle: distance of fp32 layouts from one process.  Right: of 16 bits from fp32, and other seeds."""
    found = succeeded([record for record in records if record.suite == SUITE], "")
    ran = [r for r in found if r.series.loss and None not in r.series.loss and not r.name.startswith(BATCH)]
    reference = next((record for record in ran if record.name == REFERENCE), None)
    controls = [record for record in ran if record.name.startswith(CONTROL)]
    if reference is None or not controls:
        return Drawing("convergence", TITLE, "No curve of one process with its controls.", (), RUN)
    faults = [record for record in ran if record.name.startswith(FAULT)]
    seeds = [record for record in ran if record.name.startswith(SEED)]
    fine = {id(record) for record in (reference, *controls, *faults, *seeds)}
    layouts = [r for r in ran if id(r) not in fine and r.experiment.layout.precision == "fp32"]
    short = [r for r in ran if id(r) not in fine and r.experiment.layout.precision != "fp32"]

    figure, (left, middle, right) = canvas(4.6, 1, 3, width_ratios=(0.9, 1.3, 0.9))
    _losses(left, reference, layouts, short, seeds)
    _strays(middle, reference, controls, layouts, faults)
    _precision(right, reference, short, seeds)
    largest = max((max(_all(r, reference)) for r in layouts), default=0.0)
    explained = max(max(_all(r, reference)) for r in controls)
    steps = len(reference.series.loss or ())
    caption = (
        f"{reference.experiment.model.name} on text for {steps} steps: {len(layouts)} layouts in fp32 and {len(short)} "
        f"in 16 bits against one process in fp32, relative, root mean squares of {SMOOTH} steps. Largest difference at "
        f"any step of an fp32 layout: {largest:.1e}, of one process with its sums in another order: {explained:.1e}. "
        "Dotted: small faults, which are no rounding."
    )
    missing = "" if layouts and faults and short and seeds else RUN
    return Drawing("convergence", TITLE, caption, tuple(r.at for r in ran), missing, figure)


def _losses(
    axes: Axes, reference: Record, layouts: list[Record], short: list[Record], seeds: list[Record]
) -> None:
    for label, records, colour, dashes in (
        ("other seeds", seeds, GREY, "-"),
        ("fp16, bf16", short, VERMILION, "-"),
        ("one process, fp32", [reference], INK, "-"),
        ("layouts, fp32", layouts, SKY, (0, (2, 4))),
    ):
        for record in records:
            losses = [loss for loss in record.series.loss or () if loss is not None]
            axes.plot(range(1, len(losses) + 1), losses, color=colour, lw=0.7, ls=dashes, label=label)
    axes.set_title("loss")
    axes.set_ylabel("loss (nats per token)")
    _finish(axes)


def _strays(
    axes: Axes, reference: Record, controls: list[Record], layouts: list[Record], faults: list[Record]
) -> None:
    band = [_smooth(record, reference) for record in controls]
    steps = range(SMOOTH, SMOOTH * len(band[0]) + 1, SMOOTH)
    low, high = ([pick(at) for at in zip(*band, strict=True)] for pick in (min, max))
    label = "one process, other orders of sums"
    axes.fill_between(steps, low, high, color=GREY, alpha=0.5, lw=0, label=label)
    for record in sorted(layouts, key=lambda r: list(LAYOUTS).index(kind_of(r))):
        kind = kind_of(record)
        axes.plot(steps, _smooth(record, reference), color=LAYOUTS[kind], lw=0.8, label=kind)
    for record in faults:
        values = _smooth(record, reference)
        axes.plot(steps, values, color=INK, lw=1.0, ls=":")
        said, last = FAULTS.get(record.name, record.name), (steps[-1], values[-1])
        axes.annotate(said, last, (2, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.set_yscale("log")
    axes.set_title("fp32: distance from one process")
    _finish(axes)


def _precision(axes: Axes, reference: Record, short: list[Record], seeds: list[Record]) -> None:
    for record in (*seeds, *short):
        name = record.experiment.layout.precision if record in short else "other seeds"
        values = _smooth(record, reference)
        steps = range(SMOOTH, SMOOTH * len(values) + 1, SMOOTH)
        axes.plot(steps, values, color=PRECISIONS.get(name, GREY), lw=0.8, label=name)
    if seeds or short:
        axes.set_yscale("log")
    axes.set_title("16 bits: distance from fp32")
    _finish(axes)


def _finish(axes: Axes) -> None:
    """A name once for all curves of a kind, below the axes."""
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        shown, below = [*handles.values()], (-0.02, -0.17)
        axes.legend(shown, [*handles], loc="upper left", bbox_to_anchor=below, fontsize=8)
    axes.set_xlabel("optimizer step")
    quiet(axes, "y")


def kind_of(record: Record) -> str:
    """Which of `LAYOUTS` a record is."""
    layout = record.experiment.layout
    if record.experiment.engine != "native":
        return "DeepSpeed"
    split = [layout.dp > 1, layout.tp > 1, layout.pp > 1]
    if sum(split) > 1:
        return "two of these"
    return list(LAYOUTS)[split.index(True)] if any(split) else "data parallel, ZeRO 1-3"


def _all(record: Record, reference: Record) -> list[float]:
    return distances(record.series.loss or (), reference.series.loss or ())


def _smooth(record: Record, reference: Record) -> list[float]:
    """Root mean squares of so many steps; what an fp32 loss cannot tell from none is drawn as its rounding."""
    found = _all(record, reference)
    parts = [found[start : start + SMOOTH] for start in range(0, len(found) - SMOOTH + 1, SMOOTH)]
    return [max(root_mean_square(part), ROUNDING / 2) for part in parts]
