"""Figures of predicted against published values, and of uncertain system properties that published values imply."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import TYPE_CHECKING, Any

from repro.accuracy.validate import published
from repro.accuracy.validate.implied_inputs import ImpliedInput
from repro.accuracy.validate.published import Point
from repro.claims.published import UNITS
from repro.config.systems.unknowns import PACE, SPREAD
from repro.config.words import count_noun as count_nouns
from repro.report.figures import style
from repro.report.figures.style import Drawing
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes


VALIDATION_COMMAND = "repro run suites/zero_throughput.toml --evidence simulated"
VALIDATION = Drawing(
    "validation",
    "Published throughput against predicted",
    "The results folder has no predictions of published times or rates.",
    missing=VALIDATION_COMMAND,
    evidence=SIMULATED,
)
FAMILY_STYLES = {
    published.V100_MEGATRON: (style.VERMILION, "o"),
    published.V100_ZERO: (style.BLUE, "s"),
    published.A100_MEGATRON: (style.GREEN, "^"),
    published.YUAN: (style.PURPLE, "D"),
    published.NODE: (style.ORANGE, "P"),
    published.CLUSTER: (style.SKY, "X"),
    published.OTHER: (style.GREY, "v"),
}
"""Colour and marker of each family of published runs, such as Megatron-LM on V100."""
MAX_NAMED_POINTS = 4
"""Maximum number of labelled points per panel, those with the largest errors of predicted over published values."""
MAX_LINE_CHARACTERS = 40
"""Maximum length of a point's label on one line, in characters; longer labels have two lines."""


def draw_validation(found: Sequence[Point]) -> Drawing:
    """Draw predicted against published values: rates in TFLOP/s per GPU (left), and ratios of two runs (right)."""
    judged = [point for point in found if not point.left_out]
    rates = [point for point in judged if point.kind == published.RATE and point.device_flops]
    ratios = [point for point in judged if point.kind == published.RATIO]
    if not rates:
        return VALIDATION
    import pandas as pd

    # Both panels share one legend, because some groups of sources publish only ratios, which are in the right panel.
    seen = {point.family for point in [*rates, *ratios]}
    styles = {family: FAMILY_STYLES[family] for family in published.FAMILIES if family in seen}
    figure, (left, right) = style.make_axes(5.0, 1, 2)
    for axes, group, what in ((left, rates, "TFLOP/s per GPU"), (right, ratios, "ratio of two runs")):
        if not group:
            axes.set_visible(False)
            continue
        places = [_position(point) for point in group]
        for point, (x, _) in zip(group, places, strict=True):
            colour = styles[point.family][0]
            axes.plot([x, x], _interval_of(point), color=colour, lw=0.9, alpha=0.55, zorder=2.5)
        frame = pd.DataFrame(places, columns=["published", "predicted"])
        frame["family"] = [point.family for point in group]
        style.scatter_by(axes, frame, "family", styles, s=28, alpha=0.85, lw=0, zorder=3)
        _draw_error_bands(axes, places, what)
        _name_outliers(axes, group)
    right.axvline(1, color=style.MUTED, lw=0.8, ls=":")
    right.axhline(1, color=style.MUTED, lw=0.8, ls=":")
    style.draw_legend_above(figure, styles, ncols=min(3, len(styles)), handletextpad=0.2)
    runs = sorted({run for point in judged for run in point.runs})
    return VALIDATION.drawn(figure, _validation_caption(found), runs, missing=False)


def _position(point: Point) -> tuple[float, float]:
    """Return a published value and its prediction as the coordinates of a point, in TFLOP/s per GPU or as a ratio."""
    if point.kind == published.RATE:
        predicted = point.device_flops / units.TERA
        return predicted / point.factor, predicted
    return point.published * UNITS[point.unit], point.predicted * UNITS[point.unit]


def _interval_of(point: Point) -> tuple[float, float]:
    """Return the 90 % interval of the prediction of a published value, in TFLOP/s per GPU or as a ratio of two runs."""
    _, predicted = _position(point)
    low, high = predicted * point.low / point.predicted, predicted * point.high / point.predicted
    # For a published time, the longest time corresponds to the smallest rate.
    if point.unit in published.TIMES:
        low, high = predicted * point.predicted / point.high, predicted * point.predicted / point.low
    return low, high


def _draw_error_bands(axes: Axes, at: Sequence[tuple[float, float]], what: str) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    values = [value for place in at for value in place]
    low, high = min(values) / 1.25, max(values) * 1.25
    line = [low, high]
    for share, alpha in ((0.25, 0.16), (0.10, 0.28)):
        below, above = ([factor * v for v in line] for factor in (1 - share, 1 + share))
        axes.fill_between(line, below, above, color=style.GREY, alpha=alpha, lw=0)
    axes.plot(line, line, color=style.MUTED, lw=0.9)
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, aspect="equal")
    ticks = [v for v in (0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500) if low <= v <= high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel=f"published, {what}", ylabel=f"predicted, {what}")


def _name_outliers(axes: Axes, points: Sequence[Point]) -> None:
    """Label the drawn predictions with the largest errors with the claim and the label of their published value."""
    named: list[float] = []
    box = {"facecolor": "white", "linewidth": 0, "pad": 1}
    kw: dict[str, Any] = {"fontsize": 6.5, "color": style.MUTED, "zorder": 2, "bbox": box, "va": "center"}
    far = [point for point in points if abs(point.error) > 0.25]
    for point in sorted(far, key=lambda point: -abs(point.error)):
        height = log10(_position(point)[1])
        if len(named) == MAX_NAMED_POINTS or any(abs(height - n) < 0.05 for n in named):
            continue
        named.append(height)
        words = f"{point.claim}, {point.label.partition(':')[0]}"
        words = words if len(words) <= MAX_LINE_CHARACTERS else words.replace(", ", ",\n", 1)
        offset, side = ((-5, 0), "right") if point.error > 0 else ((5, 0), "left")
        style.write_near(axes, words, _position(point), offset, ha=side, **kw)


def _validation_caption(found: Sequence[Point]) -> str:
    parts = [
        f"{family.name}: {family.points} points, median error {units.percent(family.median)}, "
        f"{family.close} within 25 %, largest error {family.worst.error:+.0%}"
        for family in published.family_statistics(found)
    ]
    return (
        "Simulated, not measured: each dot is a published run, predicted from its model, layout, batch, "
        "software and machine; vertical lines are 90 % intervals from uncertain inputs. Bands: 10 and 25 %. "
        "Omitted: bounds, means, and published values that calibrate "
        f"the time model. {count_bases(point.rests_on for point in found if not point.left_out)} {'; '.join(parts)}."
    )


IMPLIED = Drawing(
    "implied",
    "Values of uncertain inputs that published values imply",
    "The results folder has no prediction that implies the value of an uncertain input.",
    missing=VALIDATION_COMMAND,
    evidence=SIMULATED,
)
MAX_IMPLIED_PANELS = 8
MAX_LABELLED_ROWS = 24
"""Maximum number of published values in a panel with a label each; with more, only contradicting values have one."""


def draw_implied(found: Sequence[ImpliedInput]) -> Drawing:
    """Draw one panel per uncertain property of a system, with a line for the range implied by each published value."""
    shown = select_implied(found)
    if not shown:
        return IMPLIED
    heights = [0.55 + 0.15 * max(2, min(len(one.needs), MAX_LABELLED_ROWS)) for one in shown]
    figure, grid = style.make_axes(sum(heights), len(shown), 1, squeeze=False, height_ratios=heights)
    for axes, one in zip(grid[:, 0], shown, strict=True):
        _draw_implied_panel(axes, one)
    text = " ".join(f"{one.key} of {one.system}: {one.words}" for one in shown)
    caption = (
        "Each panel varies one uncertain simulation input. Grey: its range in the system file, and the value used. "
        "Lines: input values for which the prediction is within the tolerance of a published value; dots: input values "
        f"for which both are equal; crosses at the right: no input value suffices. {text}"
    )
    return IMPLIED.drawn(figure, caption, (), missing=False)


def select_implied(found: Sequence[ImpliedInput]) -> list[ImpliedInput]:
    """Return the uncertain inputs to draw, one or more per system; first those that most published values contradict.

    Excluded: ratio of kernel times to calibrated ones (`PACE`) and spread of kernel times, which absorb model errors.
    """
    telling = [one for one in found if one.key not in (PACE, SPREAD)]
    ordered = sorted(telling, key=lambda one: (-one.torn, -len(one.needs)))
    first = list({one.system: one for one in reversed(ordered)}.values())
    rest = [one for one in ordered if one not in first]
    picked = [*first, *rest][:MAX_IMPLIED_PANELS]
    return [one for one in ordered if one in picked]


def _draw_implied_panel(axes: Axes, one: ImpliedInput) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.axvspan(one.low, one.high, color=style.GREY, alpha=0.3, lw=0)
    axes.axvline(one.best, color=style.INK, lw=0.9)
    against = {need.row for need in one.contradiction or ()}
    right = one.searched[1]
    for y, need in enumerate(one.needs):
        colour = style.VERMILION if need.row in against else style.BLUE
        if need.low is not None and need.high is not None:
            axes.plot([need.low, need.high], [y, y], color=colour, lw=1.6, solid_capstyle="butt", alpha=0.6)
        else:
            axes.plot(right, y, "x", color=style.MUTED, ms=4, clip_on=False)
        if need.value is not None:
            axes.plot(need.value, y, "o", color=colour, ms=3.2)
    few = len(one.needs) <= MAX_LABELLED_ROWS
    rows = {y: need.row for y, need in enumerate(one.needs) if few or need.row in against}
    named = {y: row.replace("/", " ", 1) for y, row in rows.items()}
    axes.set_yticks([*named], [*named.values()], fontsize=6)
    axes.set_ylabel(count_nouns(len(one.needs), "row"))
    logarithmic = one.searched[0] > 0
    axes.set(xscale="log" if logarithmic else "linear", xlim=one.searched, ylim=(len(one.needs) - 0.4, -0.6))
    axes.set_title(f"{one.key} of {one.system}")
    if logarithmic:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    style.set_grid(axes, "x")
