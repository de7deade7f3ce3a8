"""Marks of values: published solid, simulated hatched, measured dotted, analytic a diamond, missing dashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repro.report.figures.style import GREY, INK, MUTED, VERMILION
from repro.report.figures.values import Ours, Value
from repro.results.schema import SIMULATED

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND_HATCHES = {SIMULATED: "//////", "measured": "....."}
PLACE_WIDTH = 0.84
"""Total width of the bars at a place, in units of the axis."""


@dataclass(frozen=True)
class BarPair:
    """Position of a series' pair of bars at a place: the centre, and the width of both bars."""

    middle: float
    width: float


def bar_pair(place: int, series: float, count: int) -> BarPair:
    """Return the bar pair of series number `series` of `count` at `place`."""
    width = PLACE_WIDTH / count
    return BarPair(place - PLACE_WIDTH / 2 + (series + 0.5) * width, width * 0.94)


def draw_bars(axes: Axes, at: BarPair, value: Value, colour: str, size: float) -> None:
    """Draw the published bar on the left and our bar on the right, or a dashed outline where a record is missing."""
    half = at.width / 2
    left, right = at.middle - half / 2, at.middle + half / 2
    printed, ours = value.published, value.predicted
    if printed:
        axes.bar(left, printed.value / size, half, color=colour, lw=0, zorder=2)
        spread = max(value.error, (printed.high - printed.low) / 2) / size
        if spread:
            axes.errorbar(left, printed.value / size, spread, color=INK, lw=0.9, capsize=1.5, zorder=4)
    else:
        axes.annotate(
            "?", (left, 0), (0, 2), textcoords="offset points", ha="center", color=MUTED, fontsize=8
        )
    if ours:
        axes.bar(right, ours.value / size, half, zorder=2, **_fill(ours, colour))
        _interval(axes, right, ours, size)
        if not ours.fits:
            _cross(axes, right, ours.value / size)
    elif printed and not value.of_kind("analytic"):
        outline: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "linestyle": (0, (3, 2))}
        axes.bar(right, printed.value / size, half, lw=0.9, zorder=1, **outline)
    weaker = value.of_kind(SIMULATED)
    if weaker and weaker is not ours:
        look: dict[str, Any] = {"marker": "s", "facecolor": "white", "edgecolor": INK, "lw": 1.1}
        axes.scatter(right, weaker.value / size, s=24, zorder=5, **look)
    analytic = value.of_kind("analytic")
    if analytic:
        axes.scatter(right, analytic.value / size, s=26, marker="D", c=INK, lw=0, zorder=5)


def draw_points(axes: Axes, at: BarPair, value: Value, colour: str, size: float) -> None:
    """Draw a published disc and our square, joined by a line, on a logarithmic axis."""
    quarter = at.width / 4
    left, right = at.middle - quarter, at.middle + quarter
    printed, ours = value.published, value.predicted
    if printed and ours:
        axes.plot([left, right], [printed.value / size, ours.value / size], color=colour, lw=1.2, zorder=2)
    if printed:
        axes.scatter(left, printed.value / size, s=44, color=colour, lw=0, zorder=3)
    if ours:
        filled = _fill(ours, colour)
        face, edge = filled["facecolor"], filled["edgecolor"]
        axes.scatter(
            right, ours.value / size, s=40, marker="s", facecolor=face, edgecolor=edge, lw=1.4, zorder=3
        )
        _interval(axes, right, ours, size)
        if not ours.fits:
            _cross(axes, right, ours.value / size)
    elif printed:
        axes.scatter(
            right,
            printed.value / size,
            s=40,
            marker="s",
            facecolor="white",
            edgecolor=GREY,
            ls="--",
            zorder=1,
        )


def draw_error(axes: Axes, at: BarPair, value: Value, colour: str, far: float) -> float:
    """Draw the relative error of our value as a stem with a number; return the drawn height, 0 without two values."""
    ours, printed = value.predicted, value.published
    if printed is None:
        return 0.0
    if ours is None:
        axes.annotate("no\nrecord", (at.middle, 0), ha="center", va="center", color=MUTED, fontsize=6.5)
        return 0.0
    off = ours.value / printed.value - 1
    shown = max(-far, min(far, off))
    calibrates = ours.agrees is None and not ours.possible
    axes.plot([at.middle, at.middle], [0, shown], color=GREY if calibrates else colour, lw=1.6, zorder=2)
    if ours.high > ours.low:  # limited to the axis
        ends = [max(-far, min(far, end / printed.value - 1)) for end in (ours.low, ours.high)]
        axes.plot([at.middle, at.middle], ends, color=INK, lw=5, alpha=0.18, solid_capstyle="butt", zorder=1)
    face = colour if ours.agrees else "white"
    edge = GREY if calibrates else colour
    axes.scatter(at.middle, shown, s=26, facecolor=face, edgecolor=edge, lw=1.4, zorder=3)
    words = (
        "cal." if calibrates else f"{off:+.0%}".replace("-", "−").replace("−0%", "0%").replace("+0%", "0%")
    ) + "?" * ours.possible
    above = shown >= 0
    axes.annotate(
        words,
        (at.middle, shown),
        (0, 4 if above else -4),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        fontsize=6.5,
        color=MUTED if ours.agrees else INK,
    )
    return shown


def draw_legend(figure: Figure, colours: dict[str, str], values: Sequence[Value], *, dots: bool) -> None:
    """Draw the legend of the series' colours, and of the fills and signs that occur. `dots`: some panel has points."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    plain: dict[str, Any] = {"linestyle": "none"}
    if len(colours) > 1:
        handles += [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    if any(value.published for value in values):
        handles.append(Patch(facecolor=MUTED, label="published"))
    kinds = {value.predicted.kind for value in values if value.predicted}
    handles += [
        Patch(facecolor="white", edgecolor=MUTED, hatch=KIND_HATCHES[kind], label=kind)
        for kind in ("measured", SIMULATED)
        if kind in kinds
    ]
    if any(value.predicted is not value.of_kind(SIMULATED) and value.of_kind(SIMULATED) for value in values):
        beside = "simulated, where measured too"
        handles.append(
            Line2D([], [], marker="s", color=INK, mfc="white", markersize=5, label=beside, **plain)
        )
    if any(value.of_kind("analytic") for value in values):
        handles.append(Line2D([], [], marker="D", color=INK, markersize=5, label="analytic", **plain))
    if any(value.published and not value.ours for value in values):
        handles.append(Patch(facecolor="none", edgecolor=GREY, linestyle="--", label="not run"))
    if any(value.published is None for value in values):
        handles.append(Line2D([], [], marker="$?$", color=MUTED, markersize=6, label="not printed", **plain))
    if any(ours.kind == SIMULATED and not ours.fits for value in values for ours in value.ours):
        handles.append(
            Line2D(
                [], [], marker="x", color=VERMILION, markersize=6, label="does not fit, simulated", **plain
            )
        )
    compared = [value.predicted for value in values if value.published and value.predicted]
    if any(ours.possible for ours in compared):
        words = "?: possible, unknown inputs decide"
        handles.append(Line2D([], [], marker="o", color=MUTED, mfc="white", label=words, **plain))
    if any(ours.agrees is None and not ours.possible for ours in compared):
        handles.append(
            Line2D(
                [], [], marker="o", color=GREY, mfc="white", label="cal.: calibrates, no prediction", **plain
            )
        )
    elif any(ours.agrees is False for ours in compared):
        handles.append(
            Line2D([], [], marker="o", color=MUTED, mfc="white", label="beyond the tolerance", **plain)
        )
    names = [str(handle.get_label()) for handle in handles]
    both: list[Any] = []
    if dots:
        disc = Line2D([], [], marker="o", color=MUTED, markersize=6, **plain)
        square = Line2D([], [], marker="s", color=MUTED, mfc="white", markersize=6, **plain)
        signs = {"published": disc} | dict.fromkeys(kinds, square)
        both += [
            (handle, signs[name]) if name in signs else handle
            for handle, name in zip(handles, names, strict=True)
        ]
    else:
        both = [*handles]
    figure.legend(
        both,
        names,
        loc="outside upper center",
        ncols=len(both) if len(both) <= 5 else (len(both) + 1) // 2,
        handlelength=1.6,
        handler_map={tuple: HandlerTuple(ndivide=None)},
    )


def _interval(axes: Axes, x: float, ours: Ours, size: float) -> None:
    """Draw the interval of the evidence, if it has one."""
    if ours.high > ours.low:
        spread = [[(ours.value - ours.low) / size], [(ours.high - ours.value) / size]]
        axes.errorbar(x, ours.value / size, spread, color=INK, lw=0.9, capsize=1.5, zorder=4)


def _fill(ours: Ours, colour: str) -> dict[str, Any]:
    return {"facecolor": "white", "edgecolor": colour, "hatch": KIND_HATCHES[ours.kind], "linewidth": 0.9}


def _cross(axes: Axes, x: float, y: float) -> None:
    axes.annotate(
        "×",
        (x, y),
        (0, 0),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=VERMILION,
        fontsize=11,
    )
