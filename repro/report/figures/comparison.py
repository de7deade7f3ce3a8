"""Ratios of strategies that ran interleaved, with their confidence intervals."""

from __future__ import annotations

from repro.report.figures.style import BLUE, INK, MUTED, ORANGE, Drawing, canvas, quiet
from repro.results.schema import ComparisonRecord
from repro.util import units

TITLE = "Throughput of compared strategies"
RUN = "repro run suites/engines.toml --only 'speed-*'"

MOST = 40
"""Lines; more are no picture."""


def draw(comparisons: list[ComparisonRecord]) -> Drawing:
    """One line a comparison: the median of the rounds' ratios, its 95 % interval, and every round."""
    newest = sorted(comparisons, key=lambda r: r.order, reverse=True)[:MOST]
    shown = sorted(newest, key=lambda r: (r.baseline.name, r.subject.name))
    if not shown:
        return Drawing("comparison", TITLE, "No comparison in the store.", (), RUN)

    figure, axes = canvas(1.3 + 0.32 * len(shown))
    for y, record in enumerate(shown):
        low, high, ratio = record.low, record.high, record.ratio
        rounds = _ratios(record)
        axes.scatter(rounds, [y + 0.24] * len(rounds), s=12, color=MUTED, alpha=0.55, linewidths=0, zorder=2)
        known = low is not None and high is not None
        colour = ORANGE if high is not None and high < 1 else BLUE
        if known:
            axes.plot([low, high], [y, y], color=colour, linewidth=3.5, solid_capstyle="butt", zorder=3)
        fill = colour if known else "white"
        axes.scatter(ratio, y, s=46, color=fill, edgecolors=INK if known else colour, linewidths=1, zorder=4)
        words = f"{ratio:.2f} {units.interval(low, high)}"
        axes.annotate(words, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8.5)
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set_yticks(range(len(shown)), [f"{r.subject.name}  /  {r.baseline.name}" for r in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    ends = [1.0, *(x for r in shown for x in (r.low, r.high, r.ratio, *_ratios(r)) if x is not None)]
    margin = 0.06 * max(0.2, max(ends) - min(ends))
    axes.set_xlim(min(ends) - margin, max(ends) + margin)
    axes.set_xlabel("samples/s, subject over baseline (right of 1: the subject is faster)")
    quiet(axes, "x")

    rounds = sorted({r.rounds for r in shown})
    caption = (
        f"The pairs ran interleaved (A B A B ...) in {' or '.join(map(str, rounds))} rounds. Large dots: "
        "median of the rounds' ratios; bars: its 95 % bootstrap interval (BCa); small dots: single rounds. "
        "Orange: the whole interval is below 1."
    )
    if len(comparisons) > len(shown):
        caption += f" The newest {len(shown)} of {len(comparisons):,}."
    if rounds[0] <= 5:
        caption += " An interval from five rounds or fewer cannot give more than 94 % coverage."
    return Drawing("comparison", TITLE, caption, tuple(r.at for r in shown), "", figure)


def _ratios(record: ComparisonRecord) -> list[float]:
    return [subject / baseline for baseline, subject in record.pairs if baseline]
