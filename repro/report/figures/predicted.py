"""Predicted against measured: the runs of this store that were also simulated, one dot a run."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from repro.config.words import counted as so_many
from repro.report.figures.style import BLUE, GREY, INK, MUTED, Drawing, Record, canvas, quiet
from repro.results.metrics import STEP_SECONDS
from repro.simulate.time.calibration import basis_of_record, count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ID, TITLE = "machine", "Predicted against measured"
PANELS = (
    ("memory.peak_bytes", "peak memory of the fullest rank", units.size),
    ("comm.sent_bytes", "sent by a rank in a step", units.size),
    (STEP_SECONDS, "seconds of a step", units.seconds),
)
RUN = "repro run suites/smoke.toml --evidence simulated"
RUN_TIMES = (
    "repro calibrate --system local --gpus 2 --output here.toml && "
    "repro run suites/machine.toml --only '*-on-2' && "
    "repro run suites/machine.toml --only '*-on-2' --evidence simulated --system here.toml"
)
Pairs = list[tuple[str, float, float]]
"""Label of the record, measured, predicted."""


def draw(experiments: list[Record], simulated: list[Record]) -> Drawing:
    """A panel a quantity: how far off the prediction is, over what was measured."""
    found = {metric: pairs(experiments, simulated, metric) for metric, _, _ in PANELS}
    missing = " && ".join(
        command
        for command, metric in ((RUN, "memory.peak_bytes"), (RUN_TIMES, STEP_SECONDS))
        if not found[metric]
    )
    if not any(found.values()):
        return Drawing(ID, TITLE, "No measured run in the store was also simulated.", (), missing)
    figure, grid = canvas(2.9, 1, len(PANELS))
    parts = []
    for axes, (metric, what, words) in zip(grid, PANELS, strict=True):
        points = found[metric]
        if not points:
            axes.set_axis_off()
            axes.text(
                0.5,
                0.5,
                f"{what}:\nnothing predicted\nfor this machine",
                ha="center",
                va="center",
                color=MUTED,
            )
            continue
        _panel(axes, points, what, words)
        errors = [abs(predicted / measured - 1) for _, measured, predicted in points]
        parts.append(
            f"{what}: {so_many(len(points), 'run')}, median error {units.percent(median(errors))}, "
            f"largest {units.percent(max(errors))}"
        )
    shown = {name for points in found.values() for name, _, _ in points}
    newest, timed = _newest(simulated, STEP_SECONDS), found[STEP_SECONDS]
    caption = (
        "Measured by the processes of this store's machine, predicted from the trace of the same step. Bands: 10 and "
        f"25 %. {'; '.join(parts)}. {count_bases(basis_of_record(newest[name]) for name, _, _ in timed)}"
    )
    return Drawing(ID, TITLE, caption.rstrip(), tuple(sorted(shown)), missing, figure)


def pairs(experiments: list[Record], simulated: list[Record], metric: str) -> Pairs:
    """Measured runs and the newest simulation of the same experiment."""
    predicted = _newest(simulated, metric)
    return [
        (record.at, record.metrics[metric], float(predicted[record.at].metrics[metric]))
        for record in experiments
        if record.outcome == "ok"
        and record.experiment.engine == "native"
        and record.metrics.get(metric)
        and record.at in predicted
    ]


def _newest(simulated: list[Record], metric: str) -> dict[str, Record]:
    """The newest simulation of each experiment that has the metric: as it is, or on a calibrated file (`@NAME`).

    One that was moved to a machine of the reports says nothing about this one.
    """
    from repro.config import systems

    published = set(systems.names())
    return {
        record.at.partition("@")[0]: record
        for record in sorted(simulated, key=lambda record: record.order)
        if record.metrics.get(metric) and record.name.partition("@")[2] not in published
    }


def _panel(axes: Axes, points: Pairs, what: str, words: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    measured = [value for _, value, _ in points]
    errors = [predicted / value - 1 for _, value, predicted in points]
    for room, alpha in ((0.25, 0.16), (0.10, 0.28)):
        axes.axhspan(-room, room, color=GREY, alpha=alpha, lw=0)
    axes.axhline(0, color=INK, lw=0.8)
    axes.scatter(measured, errors, s=22, color=BLUE, edgecolors=INK, lw=0.3, alpha=0.8, zorder=3)
    far = 1.15 * max(0.3, *map(abs, errors))
    axes.set(xscale="log", xlim=(min(measured) / 1.6, max(measured) * 1.6), ylim=(-far, far))
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title(what)
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted less measured")
    quiet(axes, "y")
