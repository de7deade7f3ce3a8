"""Figures of training losses: strategies against one process, convergence runs, and results that a user selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.report.figures import style
from repro.report.figures.style import Drawing, Record
from repro.results.metrics import FP32_ROUNDING, loss_distances, root_mean_square

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PARITY_PREFIX, SINGLE_PROCESS = "parity-", "parity-single"
PARITY = Drawing(
    "loss",
    "Loss of every parallel strategy and of one process",
    "The results folder has no record of the experiments parity-*.",
    missing="repro run suites/smoke.toml --only 'parity-*'",
)
PARITY_TOLERANCE = 1e-5
MIN_DRAWN_DIFFERENCE = 1e-9
"""Relative difference at which exactly equal losses are drawn on the logarithmic axis."""


def draw_parity(records: list[Record]) -> Drawing:
    """Draw the loss of each parallel strategy (left), and its relative difference from one process (right)."""
    shown = [r for r in style.successful_records(records, PARITY_PREFIX) if r.series.loss]
    single = next((r for r in shown if r.name == SINGLE_PROCESS), None)
    if single is None:
        words = f"No record of {SINGLE_PROCESS}, the baseline of all other experiments."
        return replace(PARITY, caption=words) if shown else PARITY
    others = [r for r in shown if r is not single]
    others.sort(key=lambda r: (list(STRATEGY_LINES).index(_strategy_of(r)), r.experiment.layout.zero, r.name))
    reference = single.series.loss or []

    rows = max(3.2, 1.1 + 0.24 * len(others))
    figure, (left, right) = style.make_axes(rows, 1, 2, width_ratios=(1, 1.35))
    named: dict[str, Any] = {}
    for record in [single, *others]:
        kind = _strategy_of(record)
        colour, dashes = STRATEGY_LINES[kind]
        (line,) = left.plot(*_loss_by_step(record), color=colour, linestyle=dashes, linewidth=1.6)
        named.setdefault(kind, line)
    left.legend(named.values(), named.keys(), loc="upper right")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="loss curves, overlaid")
    style.set_grid(left, "y")

    for y, record in enumerate(others):
        drawn = [max(d, MIN_DRAWN_DIFFERENCE) for d in loss_distances(record.series.loss or [], reference)]
        colour, _ = STRATEGY_LINES[_strategy_of(record)]
        right.scatter(drawn, [y] * len(drawn), s=14, color=colour, alpha=0.35, linewidths=0)
        if drawn:
            right.scatter(max(drawn), y, s=34, color=colour, edgecolors=style.INK, linewidths=0.8, zorder=3)
    right.axvline(PARITY_TOLERANCE, color=style.INK, linewidth=1.2, linestyle="--")
    right.text(PARITY_TOLERANCE * 1.25, -0.55, "tolerance", ha="left", va="bottom", fontsize=8)
    right.set_xscale("log")
    right.set_xlim(MIN_DRAWN_DIFFERENCE * 0.6, max(1e-3, *right.get_xlim()) if others else 1e-3)
    ticks = {MIN_DRAWN_DIFFERENCE: "equal"} | {10.0**k: f"1e{k}" for k in range(-8, -2)}
    right.set_xticks([*ticks], [*ticks.values()])
    right.minorticks_off()
    right.set_yticks(range(len(others)), [r.name.removeprefix(PARITY_PREFIX) for r in others])
    right.set(xlabel="relative loss difference from one process, every step", ylim=(len(others) - 0.4, -0.9))
    right.set_title("loss difference from one process (largest outlined)")
    style.set_grid(right, "x")

    differences = [d for r in others for d in loss_distances(r.series.loss or [], reference)]
    absent = sum(loss is None for r in [single, *others] for loss in r.series.loss or ())
    caption = (
        f"Loss of {single.experiment.model.name} from the same seed, text and global batch over "
        f"{len(reference)} steps: {len(others)} strategies against one process. Largest relative difference at any "
        f"step: {max(differences, default=0):.1e} (tolerance {PARITY_TOLERANCE:.0e} in fp32)."
    )
    if absent:
        caption += f" {absent} loss values were NaN and are not drawn."
    return PARITY.drawn(figure, caption, (r.label for r in [single, *others]), missing=not others)


STRATEGY_LINES: dict[str, tuple[str, Any]] = {
    "one process": (style.INK, "-"),
    "ZeRO 0-3": (style.BLUE, (0, (4, 1.5))),
    "tensor parallel": (style.ORANGE, (0, (1, 1))),
    "tensor x ZeRO": (style.GREEN, (0, (3, 1.25, 1.5, 1.25))),
    "recomputation": (style.PURPLE, (0, (5, 1, 1, 1))),
    "other": (style.GREY, (0, (3, 1.25, 1.25, 1.25, 1.25, 1.25))),
}
"""Colour and dashes of the loss curve of each kind of strategy; dashes leave both of two equal curves visible."""


def _loss_by_step(record: Record) -> tuple[list[int], list[float]]:
    """Return the numbers, counted from 1, of the steps of a record that have a loss, and their losses."""
    found = {step: loss for step, loss in enumerate(record.series.loss or (), 1) if loss is not None}
    return [*found], [*found.values()]


def _strategy_of(record: Record) -> str:
    layout = record.experiment.layout
    if record.name == SINGLE_PROCESS:
        return "one process"
    if layout.recompute:
        return "recomputation"
    if layout.tp > 1:
        return "tensor x ZeRO" if record.experiment.layout.dp > 1 else "tensor parallel"
    return "ZeRO 0-3" if record.experiment.layout.dp > 1 else "other"


CONVERGENCE = Drawing(
    "convergence",
    "Equality of the loss curves of all layouts",
    "The results folder has no loss curves of one process and of its repetitions with other summation orders.",
    missing="repro run suites/convergence.toml",
)
STEPS_PER_POINT = 10
"""Number of training steps per drawn point, because loss differences of single steps change their sign."""
FAULT_LABELS = {"fault-rate": "rate + 0.01 %", "fault-decay": "no weight decay", "fault-clip": "norm - 1 %"}
LAYOUT_COLOURS = {
    "data parallel, ZeRO 1-3": style.BLUE,
    "tensor parallel": style.ORANGE,
    "pipelines": style.GREEN,
    "two of these": style.PURPLE,
    "DeepSpeed": style.VERMILION,
}
PRECISION_COLOURS = {"fp16": style.VERMILION, "bf16": style.BLUE}


def draw_convergence(records: Sequence[Record]) -> Drawing:
    """Draw losses, and differences from one process in fp32: layouts (middle), 16-bit precision and seeds (right)."""
    found = style.successful_records([record for record in records if record.suite == "convergence"], "")
    every = [r for r in found if r.series.loss and None not in r.series.loss]
    ran = [record for record in every if not record.name.startswith("batch-")]
    reference = next((record for record in ran if record.name == "fp32"), None)
    prefixes = ("order-", "fault-", "seed-")
    controls, faults, seeds = (style.successful_records(ran, prefix) for prefix in prefixes)
    if reference is None or not controls:
        return CONVERGENCE
    fine = {id(record) for record in (reference, *controls, *faults, *seeds)}
    layouts = [r for r in ran if id(r) not in fine and r.experiment.layout.precision == "fp32"]
    short = [r for r in ran if id(r) not in fine and r.experiment.layout.precision != "fp32"]

    figure, (left, middle, right) = style.make_axes(4.6, 1, 3, width_ratios=(0.9, 1.3, 0.9))
    _draw_losses(left, reference, layouts, short, seeds)
    _draw_distances(middle, reference, controls, layouts, faults)
    _draw_precisions(right, reference, short, seeds)
    largest = max((max(_distances(r, reference)) for r in layouts), default=0.0)
    explained = max(max(_distances(r, reference)) for r in controls)
    steps = len(reference.series.loss or ())
    caption = (
        f"{reference.experiment.model.name}, {steps} steps: relative loss difference from one fp32 process, of "
        f"{len(layouts)} layouts in fp32 and {len(short)} in 16 bits, root mean square of {STEPS_PER_POINT} steps. "
        f"Largest difference at any step: {largest:.1e} of an fp32 layout, {explained:.1e} of one process with another "
        "summation order. Dotted: runs with a small deliberate error, larger than rounding."
    )
    missing = not (layouts and faults and short and seeds)
    return CONVERGENCE.drawn(figure, caption, (r.label for r in ran), missing=missing)


def _draw_losses(
    axes: Axes, reference: Record, layouts: list[Record], short: list[Record], seeds: list[Record]
) -> None:
    for label, records, colour, dashes in (
        ("other seeds", seeds, style.GREY, "-"),
        ("fp16, bf16", short, style.VERMILION, "-"),
        ("one process, fp32", [reference], style.INK, "-"),
        ("layouts, fp32", layouts, style.SKY, (0, (2, 4))),
    ):
        for record in records:
            axes.plot(*_loss_by_step(record), color=colour, lw=0.7, ls=dashes, label=label)
    axes.set(title="loss", ylabel="loss (nats per token)")
    _finish_axes(axes)


def _draw_distances(
    axes: Axes, reference: Record, controls: list[Record], layouts: list[Record], faults: list[Record]
) -> None:
    curves = [_smoothed_distances(record, reference) for record in controls]
    steps, _ = curves[0]
    low, high = ([pick(at) for at in zip(*(c for _, c in curves), strict=True)] for pick in (min, max))
    label = "one process, other summation orders"
    axes.fill_between(steps, low, high, color=style.GREY, alpha=0.5, lw=0, label=label)
    for record in sorted(layouts, key=lambda r: list(LAYOUT_COLOURS).index(layout_kind(r))):
        kind = layout_kind(record)
        axes.plot(*_smoothed_distances(record, reference), color=LAYOUT_COLOURS[kind], lw=0.8, label=kind)
    for record in faults:
        steps, values = _smoothed_distances(record, reference)
        axes.plot(steps, values, color=style.INK, lw=1.0, ls=":")
        label = FAULT_LABELS.get(record.name, record.name)
        style.write_near(axes, label, (steps[-1], values[-1]), (2, 0), va="center", fontsize=7.5)
    axes.set(yscale="log", title="fp32: loss difference from one process")
    _finish_axes(axes)


def _draw_precisions(axes: Axes, reference: Record, short: list[Record], seeds: list[Record]) -> None:
    for record in (*seeds, *short):
        name = record.experiment.layout.precision if record in short else "other seeds"
        colour = PRECISION_COLOURS.get(name, style.GREY)
        axes.plot(*_smoothed_distances(record, reference), color=colour, lw=0.8, label=name)
    if seeds or short:
        axes.set_yscale("log")
    axes.set_title("16 bits: loss difference from fp32")
    _finish_axes(axes)


def _finish_axes(axes: Axes) -> None:
    """Add a legend below the axes that has one entry per kind of curve, and label the axis of training steps."""
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        shown, below = [*handles.values()], (-0.02, -0.17)
        axes.legend(shown, [*handles], loc="upper left", bbox_to_anchor=below, fontsize=8)
    axes.set_xlabel("optimizer step")
    style.set_grid(axes, "y")


def layout_kind(record: Record) -> str:
    """Return the key of a record's line colour in `LAYOUT_COLOURS`: the parallelism of its layout, or its engine."""
    layout = record.experiment.layout
    if record.experiment.engine != "native":
        return "DeepSpeed"
    split = [layout.dp > 1, layout.tp > 1, layout.pp > 1]
    if sum(split) > 1:
        return "two of these"
    return list(LAYOUT_COLOURS)[split.index(True)] if any(split) else "data parallel, ZeRO 1-3"


def _distances(record: Record, reference: Record) -> list[float]:
    return loss_distances(record.series.loss or (), reference.series.loss or ())


def _smoothed_distances(record: Record, reference: Record) -> tuple[range, list[float]]:
    """Return points of a curve of relative loss differences: a step, and a root mean square over several steps.

    Each point covers `STEPS_PER_POINT` steps and is at the last of them. The minimum is half of an fp32 rounding error.
    """
    found = _distances(record, reference)
    ends = range(STEPS_PER_POINT, len(found) + 1, STEPS_PER_POINT)
    squares = (root_mean_square(found[end - STEPS_PER_POINT : end]) for end in ends)
    return ends, [max(square, FP32_ROUNDING / 2) for square in squares]


CURVES = Drawing("curves", "Loss over the steps", "no selected experiment trained for two steps or more")
MAX_NAMED_CURVES = 12
"""Maximum number of loss curves in a panel that has a legend; panels with more curves have none."""
CURVE_DASHES = ((4, 0), (4, 2), (2, 2), (1, 3))
"""Dash patterns of consecutive loss curves, which distinguish curves that coincide."""


def draw_loss_curves(records: Sequence[Record]) -> Drawing:
    """Draw the loss curve of each record with losses of two or more steps, in one panel per suite and model."""
    import seaborn

    panels: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if len(record.series.loss or ()) > 1:
            key = record.suite, record.experiment.model.name, record.shown_as
            panels.setdefault(key, []).append(record)
    if not panels:
        return CURVES
    figure, grid = style.make_axes(0.4 + 2.6 * len(panels), len(panels), 1, squeeze=False)
    for axes, ((suite, model, kind), shown) in zip(grid[:, 0], panels.items(), strict=True):
        colours = seaborn.husl_palette(len(shown), l=0.5)
        for i, (record, colour) in enumerate(zip(shown, colours, strict=True)):
            dashes = CURVE_DASHES[i % len(CURVE_DASHES)]
            axes.plot(*_loss_by_step(record), color=colour, dashes=dashes, label=record.name)
        if len(shown) <= MAX_NAMED_CURVES:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("loss (nats per token)")
        count = f", {len(shown)} curves" * (len(shown) > MAX_NAMED_CURVES)
        axes.set_title(f"{suite}: {model}, {kind}{count}")
        style.set_grid(axes, "y")
    grid[-1, 0].set_xlabel("optimizer step")
    drawn = tuple(record.label for shown in panels.values() for record in shown)
    return CURVES.drawn(figure, f"Loss of {len(drawn)} results.", drawn, missing=False)
