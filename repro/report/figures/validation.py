"""Published throughput against what is predicted, one dot a run; and the published ratios of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import TYPE_CHECKING

from repro.accuracy.validate.published import (
    A100_MEGATRON,
    CLUSTER,
    FAMILIES,
    NODE,
    OTHER,
    RATE,
    RATIO,
    TIMES,
    V100_MEGATRON,
    V100_ZERO,
    YUAN,
    Point,
    families,
)
from repro.claims.published import UNITS
from repro.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Drawing,
    canvas,
    dots,
    legend_above,
)
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ID, TITLE = "validation", "Published throughput against predicted"
RUN = "repro run suites/zero_throughput.toml --evidence simulated"
LOOK = {
    V100_MEGATRON: (VERMILION, "o"),
    V100_ZERO: (BLUE, "s"),
    A100_MEGATRON: (GREEN, "^"),
    YUAN: (PURPLE, "D"),
    NODE: (ORANGE, "P"),
    CLUSTER: (SKY, "X"),
    OTHER: (GREY, "v"),
}
"""Colour and marker of a family."""
NAMED = 4
"""Of the points furthest off, as many in each panel get their name."""
LONG = 40
"""Characters of a name that go on one line."""


def draw(found: Sequence[Point]) -> Drawing:
    """Rates in TFLOP/s per GPU on the left, ratios on the right; only points that count."""
    judged = [point for point in found if not point.left_out]
    rates = [point for point in judged if point.kind == RATE and point.device_flops]
    ratios = [point for point in judged if point.kind == RATIO]
    if not rates:
        return Drawing(
            ID, TITLE, "Nothing that was published in time is predicted.", (), RUN, evidence=SIMULATED
        )
    import pandas as pd

    # Some families have ratios only: the legend has those of both panels.
    seen = {point.family for point in [*rates, *ratios]}
    look = {family: LOOK[family] for family in FAMILIES if family in seen}
    figure, (left, right) = canvas(5.0, 1, 2)
    for axes, group, what in ((left, rates, "TFLOP/s per GPU"), (right, ratios, "ratio of two runs")):
        if not group:
            axes.set_visible(False)
            continue
        frame = pd.DataFrame([_place(point) for point in group], columns=["published", "predicted"])
        for point in group:
            x, _ = _place(point)
            axes.plot([x, x], _span(point), color=look[point.family][0], lw=0.9, alpha=0.55, zorder=2.5)
        frame["family"] = [point.family for point in group]
        dots(axes, frame, "family", look, s=28, alpha=0.85, lw=0, zorder=3)
        _frame(axes, [_place(point) for point in group], what)
        _name(axes, group)
    right.axvline(1, color=MUTED, lw=0.8, ls=":")
    right.axhline(1, color=MUTED, lw=0.8, ls=":")
    legend_above(figure, look, ncols=min(3, len(look)), handletextpad=0.2)
    return Drawing(
        ID,
        TITLE,
        _caption(found),
        tuple(sorted({run for p in judged for run in p.runs})),
        "",
        figure,
        SIMULATED,
    )


def _place(point: Point) -> tuple[float, float]:
    """Published and predicted, in TFLOP/s per GPU or as a plain ratio."""
    if point.kind == RATE:
        predicted = point.device_flops / units.TERA
        return predicted / point.factor, predicted
    return point.published * UNITS[point.unit], point.predicted * UNITS[point.unit]


def _span(point: Point) -> tuple[float, float]:
    """The interval that inputs leave of what `_place` has as predicted."""
    _, predicted = _place(point)
    low, high = predicted * point.low / point.predicted, predicted * point.high / point.predicted
    if point.unit in TIMES:  # the rate of the longest time is the least
        low, high = predicted * point.predicted / point.high, predicted * point.predicted / point.low
    return low, high


def _frame(axes: Axes, at: Sequence[tuple[float, float]], what: str) -> None:
    values = [value for place in at for value in place]
    low, high = min(values) / 1.25, max(values) * 1.25
    line = [low, high]
    for share, alpha in ((0.25, 0.16), (0.10, 0.28)):
        axes.fill_between(
            line,
            [(1 - share) * v for v in line],
            [(1 + share) * v for v in line],
            color=GREY,
            alpha=alpha,
            lw=0,
        )
    axes.plot(line, line, color=MUTED, lw=0.9)
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        ticks = [v for v in (0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500) if low <= v <= high]
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(f"published, {what}")
    axes.set_ylabel(f"predicted, {what}")


def _name(axes: Axes, points: Sequence[Point]) -> None:
    """The claim and row of the points that are furthest off, beside them."""
    named: list[float] = []
    for point in sorted(points, key=lambda point: -abs(point.error)):
        height = log10(_place(point)[1])
        if abs(point.error) <= 0.25 or len(named) == NAMED or any(abs(height - n) < 0.05 for n in named):
            continue
        named.append(height)
        left = point.error > 0
        words = f"{point.claim}, {point.label.partition(':')[0]}"
        axes.annotate(
            words if len(words) <= LONG else words.replace(", ", ",\n", 1),
            _place(point),
            xytext=(-5 if left else 5, 0),
            textcoords="offset points",
            fontsize=6.5,
            color=MUTED,
            zorder=2,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 1},
            ha="right" if left else "left",
            va="center",
        )


def _caption(found: Sequence[Point]) -> str:
    parts = [
        f"{family.name}: {family.points} points, median error {units.percent(family.median)}, "
        f"{family.close} within 25 %, worst {family.worst.error:+.0%}"
        for family in families(found)
    ]
    return (
        "Simulated, not measured: each dot is a run that a source published, predicted from its model, layout, batch, "
        "software and machine; upright lines are the 90 % intervals that unknown inputs leave. Bands: 10 and 25 %. "
        "Points that calibrate the time model are left out, and so are "
        f"bounds and means. {count_bases(point.rests_on for point in found if not point.left_out)} {'; '.join(parts)}."
    )
