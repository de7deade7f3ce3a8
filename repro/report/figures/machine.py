"""Predicted against measured: the runs of this store that were also simulated, one dot a run."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from repro.report import text
from repro.report.figures.style import BLUE, GREY, INK, MUTED, Drawing, Record, canvas, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ID, TITLE = "machine", "Predicted against measured"
PANELS = (
    ("memory.peak_bytes", "peak memory of the fullest rank", text.size),
    ("comm.sent_bytes", "sent by a rank in a step", text.size),
    ("step_seconds.median", "step", text.seconds),
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
    """A panel a quantity; on the line prediction and measurement agree."""
    found = {metric: pairs(experiments, simulated, metric) for metric, _, _ in PANELS}
    missing = " && ".join(
        command
        for command, metric in ((RUN, "memory.peak_bytes"), (RUN_TIMES, "step_seconds.median"))
        if not found[metric]
    )
    if not any(found.values()):
        return Drawing(ID, TITLE, "No measured run in the store was also simulated.", (), missing)
    figure, grid = canvas(3.7, 1, len(PANELS))
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
            f"{what}: {len(points)} runs, median error {median(errors):.1%}, largest {max(errors):.1%}"
        )
    shown = {name for points in found.values() for name, _, _ in points}
    caption = (
        "Measured by the processes of this store's machine, predicted from the trace of the same step. Bands: 10 and "
        f"25 %. {'; '.join(parts)}."
    )
    return Drawing(ID, TITLE, caption, tuple(sorted(shown)), missing, figure)


def pairs(experiments: list[Record], simulated: list[Record], metric: str) -> Pairs:
    """Measured runs and the newest simulation of the same experiment, on whichever system that was."""
    predicted: dict[str, float] = {}
    for record in sorted(simulated, key=lambda record: str(record.get("written", ""))):
        value = record["metrics"].get(metric)
        if value:
            predicted[f"{record['suite']}/{record['name'].partition('@')[0]}"] = float(value)
    return [
        (label(record), float(record["metrics"][metric]), predicted[label(record)])
        for record in experiments
        if record["outcome"] == "ok"
        and record["experiment"]["engine"] == "native"
        and record["metrics"].get(metric)
        and label(record) in predicted
    ]


def _panel(axes: Axes, points: Pairs, what: str, words: object) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    assert callable(words)
    values = [value for _, measured, predicted in points for value in (measured, predicted)]
    line = [min(values) / 1.6, max(values) * 1.6]
    for share, alpha in ((0.25, 0.16), (0.10, 0.28)):
        low, high = [(1 - share) * v for v in line], [(1 + share) * v for v in line]
        axes.fill_between(line, low, high, color=GREY, alpha=alpha, lw=0)
    axes.plot(line, line, color=MUTED, lw=0.9)
    measured, predicted = zip(*((m, p) for _, m, p in points), strict=True)
    axes.scatter(measured, predicted, s=22, color=BLUE, edgecolors=INK, lw=0.3, alpha=0.8, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=4))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: str(words(value))))
    axes.set_title(what)
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted")
