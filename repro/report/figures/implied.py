"""What the sources imply: the value of an unknown that each published row needs, beside the range that is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.accuracy.validate.implied import Implied, Need
from repro.config.systems.unknowns import PACE, SPREAD
from repro.config.words import counted
from repro.report.figures.style import BLUE, GREY, INK, MUTED, VERMILION, Drawing, canvas, quiet
from repro.results.schema import SIMULATED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ID, TITLE = "implied", "What the sources imply: the value of an unknown that each row needs"
RUN = "repro run suites/zero_throughput.toml --evidence simulated"
MOST = 8
LABELLED = 24
"""Rows of a panel that are named at its side; of more only those that contradict each other."""


def draw(found: Sequence[Implied]) -> Drawing:
    """A panel an unknown: a line a row, over the values within its tolerance, and a dot where it is exact."""
    shown = chosen(found)
    if not shown:
        return Drawing(
            ID, TITLE, "No predicted row of the store says what it needs.", (), RUN, evidence=SIMULATED
        )
    heights = [0.55 + 0.15 * max(2, min(len(one.needs), LABELLED)) for one in shown]
    figure, grid = canvas(sum(heights), len(shown), 1, squeeze=False, height_ratios=heights)
    for axes, one in zip(grid[:, 0], shown, strict=True):
        _panel(axes, one)
    text = " ".join(f"{one.key} of {one.system}: {one.words}" for one in shown)
    caption = (
        "Predicted, all other unknowns at their best values. Grey: the range that the system's file gives, and the "
        "value that is used. Lines: values that bring the prediction within the tolerance of the row; dots: where it "
        f"is what was published; crosses at the right: rows that no value serves. {text}"
    )
    return Drawing(ID, TITLE, caption, (), "", figure, SIMULATED)


def chosen(found: Sequence[Implied]) -> list[Implied]:
    """The unknowns that most rows contradict each other about, then those of most rows; one at least of each cluster.

    Not how fast a device, or the slowest, is of its kind, which scales everything: what rows need of it is the
    model's error.
    """
    telling = [one for one in found if one.key not in (PACE, SPREAD)]
    ordered = sorted(telling, key=lambda one: (-one.torn, -len(one.needs)))
    first = list({one.system: one for one in reversed(ordered)}.values())
    rest = [one for one in ordered if one not in first]
    picked = [*first, *rest][:MOST]
    return [one for one in ordered if one in picked]


def _panel(axes: Axes, one: Implied) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.axvspan(one.low, one.high, color=GREY, alpha=0.3, lw=0)
    axes.axvline(one.best, color=INK, lw=0.9)
    against = {need.row for need in one.contradiction or ()}
    right = one.searched[1]
    for y, need in enumerate(one.needs):
        colour = VERMILION if need.row in against else BLUE
        if need.low is not None and need.high is not None:
            axes.plot([need.low, need.high], [y, y], color=colour, lw=1.6, solid_capstyle="butt", alpha=0.6)
        else:
            axes.plot(right, y, "x", color=MUTED, ms=4, clip_on=False)
        if need.value is not None:
            axes.plot(need.value, y, "o", color=colour, ms=3.2)
    few = len(one.needs) <= LABELLED
    named = [(y, _short(need)) for y, need in enumerate(one.needs) if few or need.row in against]
    axes.set_yticks([y for y, _ in named], [words for _, words in named], fontsize=6)
    axes.set_ylabel(counted(len(one.needs), "row"))
    logarithmic = one.searched[0] > 0
    axes.set(xscale="log" if logarithmic else "linear", xlim=one.searched, ylim=(len(one.needs) - 0.4, -0.6))
    axes.set_title(f"{one.key} of {one.system}")
    if logarithmic:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    quiet(axes, "x")


def _short(need: Need) -> str:
    claim, _, label = need.row.partition("/")
    return f"{claim} {label}"
