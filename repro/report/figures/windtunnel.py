"""A speed-up against the bandwidth of a link: twins on emulated networks, what predicts them, what was published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from repro.config import TwinOf
from repro.config.twin import RATIO
from repro.report.figures.style import BLUE, INK, MUTED, ORANGE, Drawing, Record, canvas, quiet
from repro.results.schema import ComparisonRecord
from repro.util.units import GB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIM = "ds-3p75x-lowbw/throughput over Megatron"
"""The row of the ledger whose comparison the sweeps are of."""
SINGLE = "windtunnel_3p75x"
SWEEPS = {
    "windtunnel_between": ("between", "GB/s of a node's link to the others, in the original"),
    "windtunnel_within": ("within", "GB/s that a GPU gets inside its node, which nobody published"),
}
TITLE = "DeepSpeed's 3.75x against the bandwidth of the links"
RUN = "repro run " + " ".join(f"suites/{name}.toml" for name in (*SWEEPS, SINGLE))


class _Point(NamedTuple):
    """One comparison of twins."""

    suite: str
    twin: TwinOf
    """Of the subject."""
    record: ComparisonRecord

    @property
    def predicted(self) -> tuple[float, float]:
        """The ratio of the originals and that of the twins."""
        return self.twin.numbers[RATIO]


def draw(
    records: Sequence[Record], comparisons: Sequence[ComparisonRecord], published: float | None
) -> Drawing:
    """A panel a sweep: measured ratios with their intervals over the time model's curves, and the `published` one."""
    found = _points(records, comparisons)
    shown = {sweep: [p for p in found if p.suite == sweep] for sweep in SWEEPS}
    shown = {sweep: points for sweep, points in shown.items() if len(points) > 1}
    if not shown:
        return Drawing("windtunnel", TITLE, "No sweep of an emulated link in the store.", (), RUN)
    single = [p for p in found if p.suite == SINGLE]
    figure, panels = canvas(3.4, columns=len(shown), sharey=True, squeeze=False)
    for axes, (sweep, points) in zip(panels[0], shown.items(), strict=True):
        _panel(axes, sweep, points, single, published)
    panels[0][0].set_ylabel("samples/s, DeepSpeed over Megatron")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    used = [*single, *(p for points in shown.values() for p in points)]
    rounds = "/".join(map(str, sorted({p.record.rounds for p in used})))
    caption = (
        "Small twins that train behind slow links, in turns with their baseline; lines and band are 95 % intervals of "
        f"{rounds} rounds. The curves are the time model's, of the originals and of these twins, which no step entered."
    )
    missing = "" if len(shown) == len(SWEEPS) and single else RUN
    ran = tuple(p.record.at for p in used)
    return Drawing("windtunnel", TITLE, caption, ran, missing, figure)


def _points(records: Sequence[Record], comparisons: Sequence[ComparisonRecord]) -> list[_Point]:
    """The newest comparison of each pair, for every suite that has it: two sweeps may share a point."""
    twins: dict[str, dict[str, TwinOf]] = {}
    for record in records:
        if record.experiment.twin is not None and record.outcome == "ok":
            twins.setdefault(record.key, {})[record.suite] = record.experiment.twin
    newest: dict[tuple[str, str, str], _Point] = {}
    for c in sorted(comparisons, key=lambda c: c.order):
        for suite, twin in twins.get(c.subject.key, {}).items():
            if RATIO in twin.numbers:
                newest[suite, c.baseline.key, c.subject.key] = _Point(suite, twin, c)
    return list(newest.values())


def _panel(
    axes: Axes, sweep: str, points: Sequence[_Point], single: Sequence[_Point], published: float | None
) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    link, label = SWEEPS[sweep]

    def at(point: _Point) -> float:
        return float(getattr(point.twin, link)) / GB

    points = sorted(points, key=at)
    rates = [at(p) for p in points]
    axes.plot(
        rates, [p.predicted[0] for p in points], color=MUTED, lw=1.2, ls="--", label="predicted, originals"
    )
    axes.plot(rates, [p.predicted[1] for p in points], color=ORANGE, lw=1.4, label="predicted, twins")
    ends = [(x, p.record.low, p.record.high) for x, p in zip(rates, points, strict=True)]
    known = [(x, low, high) for x, low, high in ends if low is not None and high is not None]
    if known:
        x, low, high = zip(*known, strict=True)
        axes.fill_between(x, low, high, color=BLUE, alpha=0.18, lw=0)
        axes.vlines(x, low, high, color=BLUE, lw=1.2)
    axes.plot(
        rates, [p.record.ratio for p in points], color=BLUE, marker="o", ms=5, lw=1.2, label="measured, twins"
    )
    for p in single:
        axes.plot(
            [at(p)], [p.record.ratio], marker="D", ms=6, color=BLUE, mec=INK, ls="none", label="a larger twin"
        )
    if published is not None:
        axes.axhline(published, color=INK, lw=0.8, ls=":")
        if link == "between" and single:
            axes.plot(
                [at(single[0])], [published], marker="*", ms=11, color=INK, ls="none", label="published"
            )
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.08 * max(axes.get_ylim()[1], published or 0.0))
    quiet(axes, "y")
