"""Figures of predicted training steps: step time by part in published layouts, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from repro.claims.evidence import run_command
from repro.config.words import count_noun as count_nouns
from repro.report.figures import style
from repro.report.figures.style import Drawing, Record
from repro.report.figures.values import View
from repro.results.metrics import STEP_SECONDS
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import basis_of_record, count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BREAKDOWN = Drawing(
    "breakdown",
    "Step time by part",
    "The results folder has no simulated step time of a published layout.",
    evidence=SIMULATED,
)
YUAN_RUN, YUAN_STEP_ROW = "yuan/yuan-245b", "yuan-step-time/step"
OTHER_RUNS = {
    "Megatron-LM 1T, 3072 A100": "megatron_2021/table1-1t",
    "Megatron-LM 145.6B, 1536 A100": "megatron_2021/table1-145.6b",
    "Turing-NLG, MP 4, ZeRO 2": "turing_nlg/zero2-mp4",
    "Turing-NLG, MP 16": "turing_nlg/megatron-mp16",
    "ZeRO 100B, 400 V100": "zero_throughput/fig2-100b-zero",
    "Megatron-LM 100B, 384 V100": "zero_throughput/fig2-100b-megatron",
    "DeepSpeed 1.5B, 40 Gbit/s": "deepspeed_lowbw/lowbw-deepspeed",
    "Megatron-LM 1.5B, 40 Gbit/s": "deepspeed_lowbw/lowbw-megatron",
}
"""Simulated record `suite/name` of each published layout in the figure of step times by part, by the bar's label."""
PART_COLOURS = {
    "matrix products": style.BLUE,
    "attention": style.SKY,
    "other operators": style.GREEN,
    "compute": style.MUTED,
    "optimizer": style.PURPLE,
    "waits for tensor parallelism": style.VERMILION,
    "waits for data parallelism": style.ORANGE,
    "waits between stages": style.YELLOW,
    "waits for communication": style.INK,
    "bubble": style.GREY,
}
OPERATOR_PARTS = {"matmul": "matrix products", "attention": "attention", "optimizer": "optimizer"}
GROUP_PARTS = {"(tp)": "waits for tensor parallelism", "(pp)": "waits between stages"}


def draw_breakdown(view: View, simulated: list[Record]) -> Drawing:
    """Draw step time by part: Yuan 1.0 in seconds (left), and other published layouts as shares (right)."""
    records = {record.label: record for record in simulated if STEP_SECONDS in record.metrics}
    yuan = records.get(YUAN_RUN)
    others = {name: records[run] for name, run in OTHER_RUNS.items() if run in records}
    lacking = [run for run in (YUAN_RUN, *OTHER_RUNS.values()) if run not in records]
    suites = dict.fromkeys(run.partition("/")[0] for run in lacking)
    missing = " && ".join(run_command(suite, SIMULATED) for suite in suites)
    if yuan is None and not others:
        return replace(BREAKDOWN, missing=missing)
    widths = [width for width, shown in ((1, yuan), (2.1, others)) if shown]
    figure, grid = style.make_axes(3.9, 1, len(widths), squeeze=False, width_ratios=widths)
    seen: set[str] = set()
    if yuan is not None:
        seen |= _draw_yuan(grid[0, 0], view, yuan)
    if others:
        seen |= _draw_shares(grid[0, -1], others)
    style.draw_fills_above(
        figure, {part: PART_COLOURS[part] for part in PART_COLOURS if part in seen}, ncols=4
    )
    shown = ([yuan] if yuan is not None else []) + list(others.values())
    caption = (
        "Simulated, not measured: time of the slowest stage. Waits are communication that no computation hides; the "
        "bubble is waiting for the computation of other stages. Only Yuan's step time is published, without parts. "
        f"Claims: yuan-step-time, yuan-bubble. {count_bases(map(basis_of_record, shown))}"
    )
    return BREAKDOWN.drawn(figure, caption.rstrip(), (r.label for r in shown), missing=missing)


def seconds_by_part(record: Record) -> dict[str, float]:
    """Return the seconds of each part of a simulated step; compute is divided by operator if operators are recorded."""
    metrics, series = record.metrics, record.series.seconds
    found = dict.fromkeys(PART_COLOURS, 0.0)
    if series:
        for kind, seconds in series["busy"].items():
            found[OPERATOR_PARTS.get(kind, "other operators")] += seconds
        for name, seconds in series["exposed"].items():
            parts = (part for end, part in GROUP_PARTS.items() if name.endswith(end))
            found[next(parts, "waits for data parallelism")] += seconds
    else:
        found["compute"], found["optimizer"] = metrics["time.compute_s"], metrics["time.optimizer_s"]
        found["waits for communication"] = metrics["time.exposed_s"]
    found["bubble"] = max(0.0, metrics[STEP_SECONDS] - sum(found.values()))
    return {name: seconds for name, seconds in found.items() if seconds}


def _draw_shares(axes: Axes, records: dict[str, Record]) -> set[str]:
    """Draw the shares of the parts of step time as one bar per layout, and return the names of the drawn parts."""
    seen: set[str] = set()
    for y, record in enumerate(records.values()):
        found = seconds_by_part(record)
        shares = {name: 100 * seconds / sum(found.values()) for name, seconds in found.items()}
        style.draw_stacked_bar(axes, y, shares, PART_COLOURS, 0.62, across=True)
        seen |= set(found)
        words = units.seconds(record.metrics[STEP_SECONDS])
        style.write_near(axes, words, (100, y), (4, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(records)), list(records))
    axes.set(xlabel="% of the predicted step time", xlim=(0, 100), ylim=(len(records) - 0.5, -0.5))
    style.set_grid(axes, "x")
    return seen


def _draw_yuan(axes: Axes, view: View, record: Record) -> set[str]:
    """Draw Yuan's simulated step time by part next to the published time, and return the names of the parts."""
    printed = view.row(YUAN_STEP_ROW).row.printed
    assert printed is not None
    found, step = seconds_by_part(record), record.metrics[STEP_SECONDS]
    style.draw_stacked_bar(axes, 1, found, PART_COLOURS, 0.6, across=False)
    axes.bar(0, printed.value, 0.6, facecolor="none", edgecolor=style.INK, lw=1.3)
    for x, value, words in ((0, printed.value, printed.text), (1, step, f"{step:.2f}")):
        style.write_near(axes, f"{words} s", (x, value), (0, 3), ha="center", fontsize=8.5)
    off = f"{step / printed.value - 1:+.1%}".replace("-", "−")
    axes.set_xticks([0, 1], ["published", f"simulated\n({off})"])
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.5, 1.5), ylim=(0, 1.14 * max(step, printed.value)))
    axes.set(ylabel="seconds of a step", title="Yuan 1.0, 2128 A100")
    style.set_grid(axes, "y")
    return set(found)


MACHINE = Drawing("machine", "Predicted against measured", "No measured run was also simulated.")
MACHINE_PANELS = (
    ("memory.peak_bytes", "peak memory of the fullest rank", units.size),
    ("comm.sent_bytes", "bytes sent per rank and step", units.size),
    (STEP_SECONDS, "seconds of a step", units.seconds),
)
MACHINE_COMMAND = "repro run suites/smoke.toml --evidence simulated"
MACHINE_TIMES_COMMAND = (
    "repro calibrate --system local --gpus 2 --output here.toml && "
    "repro run suites/machine.toml --only '*-on-2' && "
    "repro run suites/machine.toml --only '*-on-2' --evidence simulated --system here.toml"
)
MeasuredPairs = list[tuple[str, float, float]]
"""Values of one metric as triples: `suite/name` of an experiment, measured value, predicted value."""


def draw_machine(experiments: list[Record], simulated: list[Record]) -> Drawing:
    """Draw the relative errors of predicted memory, sent bytes and step time over values measured on this machine."""
    found = {metric: measured_pairs(experiments, simulated, metric) for metric, _, _ in MACHINE_PANELS}
    commands = {"memory.peak_bytes": MACHINE_COMMAND, STEP_SECONDS: MACHINE_TIMES_COMMAND}
    missing = " && ".join(command for metric, command in commands.items() if not found[metric])
    if not any(found.values()):
        return replace(MACHINE, missing=missing)
    figure, grid = style.make_axes(2.9, 1, len(MACHINE_PANELS))
    parts = []
    for axes, (metric, what, words) in zip(grid, MACHINE_PANELS, strict=True):
        points = found[metric]
        if not points:
            axes.set_axis_off()
            text = f"{what}:\nno prediction\nfor this machine"
            axes.text(0.5, 0.5, text, ha="center", va="center", color=style.MUTED)
            continue
        _draw_machine_panel(axes, points, what, words)
        errors = [abs(predicted / measured - 1) for _, measured, predicted in points]
        middle, largest = units.percent(median(errors)), units.percent(max(errors))
        runs = count_nouns(len(points), "run")
        parts.append(f"{what}: {runs}, median error {middle}, largest error {largest}")
    shown = {name for points in found.values() for name, _, _ in points}
    newest, timed = _newest_simulations(simulated, STEP_SECONDS), found[STEP_SECONDS]
    caption = (
        "Measured on the machine of the results; predicted from a trace of the same step. Bands: errors of 10 and "
        f"25 %. {'; '.join(parts)}. {count_bases(basis_of_record(newest[name]) for name, _, _ in timed)}"
    )
    return MACHINE.drawn(figure, caption.rstrip(), sorted(shown), missing=missing)


def measured_pairs(experiments: list[Record], simulated: list[Record], metric: str) -> MeasuredPairs:
    """Return label, measured and predicted value of `metric` for each measured experiment that was also simulated."""
    predicted = _newest_simulations(simulated, metric)
    native = (r for r in style.successful_records(experiments, "") if r.experiment.engine == "native")
    return [
        (record.label, record.metrics[metric], float(predicted[record.label].metrics[metric]))
        for record in native
        if record.metrics.get(metric) and record.label in predicted
    ]


def _newest_simulations(simulated: list[Record], metric: str) -> dict[str, Record]:
    """Return the newest simulated record of each experiment that has the value `metric`, by `suite/name`.

    Simulations named `NAME@SYSTEM` predict a packaged system, not the measuring machine, and are omitted.
    """
    from repro.config import systems

    published = set(systems.system_names())
    return {
        record.label.partition("@")[0]: record
        for record in sorted(simulated, key=lambda record: record.order)
        if record.metrics.get(metric) and record.name.partition("@")[2] not in published
    }


def _draw_machine_panel(axes: Axes, points: MeasuredPairs, what: str, words: Callable[[float], str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    measured = [value for _, value, _ in points]
    errors = [predicted / value - 1 for _, value, predicted in points]
    for tolerance, alpha in ((0.25, 0.16), (0.10, 0.28)):
        axes.axhspan(-tolerance, tolerance, color=style.GREY, alpha=alpha, lw=0)
    axes.axhline(0, color=style.INK, lw=0.8)
    axes.scatter(measured, errors, s=22, color=style.BLUE, edgecolors=style.INK, lw=0.3, alpha=0.8, zorder=3)
    far = 1.15 * max(0.3, *map(abs, errors))
    axes.set(xscale="log", xlim=(min(measured) / 1.6, max(measured) * 1.6), ylim=(-far, far))
    axes.set(title=what, xlabel="measured", ylabel="predicted less measured")
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: words(value))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    style.set_grid(axes, "y")
