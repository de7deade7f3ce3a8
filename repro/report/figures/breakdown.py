"""Where a step's seconds go: Yuan 1.0 beside its published step, and other published layouts as shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.claims.evidence import run_command
from repro.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Drawing,
    Record,
    canvas,
    quiet,
    stacked,
)
from repro.report.figures.values import View
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import basis_of_record, count_bases
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ID, TITLE = "breakdown", "Where the seconds of a step go"
YUAN, STEP = "yuan/yuan-245b", "yuan-step-time/step"
OTHERS = {
    "Megatron-LM 1T, 3072 A100": "megatron_2021/table1-1t",
    "Megatron-LM 145.6B, 1536 A100": "megatron_2021/table1-145.6b",
    "Turing-NLG, MP 4, ZeRO 2": "turing_nlg/zero2-mp4",
    "Turing-NLG, MP 16": "turing_nlg/megatron-mp16",
    "ZeRO 100B, 400 V100": "zero_throughput/fig2-100b-zero",
    "Megatron-LM 100B, 384 V100": "zero_throughput/fig2-100b-megatron",
    "DeepSpeed 1.5B, 40 Gbit/s": "deepspeed_lowbw/lowbw-deepspeed",
    "Megatron-LM 1.5B, 40 Gbit/s": "deepspeed_lowbw/lowbw-megatron",
}
"""Name in the figure and record."""
COLOURS = {
    "matrix products": BLUE,
    "attention": SKY,
    "other operators": GREEN,
    "compute": MUTED,
    "optimizer": PURPLE,
    "waits for tensor parallelism": VERMILION,
    "waits for data parallelism": ORANGE,
    "waits between stages": YELLOW,
    "waits for communication": INK,
    "bubble": GREY,
}
KINDS = {"matmul": "matrix products", "attention": "attention", "optimizer": "optimizer"}
GROUPS = {"(tp)": "waits for tensor parallelism", "(pp)": "waits between stages"}


def draw(view: View, simulated: list[Record]) -> Drawing:
    """Left: seconds of Yuan's step.  Right: shares of the step in other layouts that a source published."""
    records = {record.at: record for record in simulated if "step_seconds.median" in record.metrics}
    yuan = records.get(YUAN)
    others = {name: records[run] for name, run in OTHERS.items() if run in records}
    lacking = [run for run in (YUAN, *OTHERS.values()) if run not in records]
    suites = dict.fromkeys(run.partition("/")[0] for run in lacking)
    missing = " && ".join(run_command(suite, SIMULATED) for suite in suites)
    if yuan is None and not others:
        return Drawing(
            ID, TITLE, "No simulated step of a published layout has a time.", (), missing, evidence=SIMULATED
        )
    widths = [width for width, shown in ((1, yuan), (2.1, others)) if shown]
    figure, grid = canvas(3.9, 1, len(widths), squeeze=False, width_ratios=widths)
    seen: set[str] = set()
    if yuan is not None:
        seen |= _yuan(grid[0, 0], view, yuan)
    if others:
        seen |= _shares(grid[0, -1], others)
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    shown = ([yuan] if yuan is not None else []) + list(others.values())
    caption = (
        "Simulated, not measured: the slowest stage's seconds. Waits are communication that nothing hides; the "
        "bubble is waiting for other stages to compute. No source prints parts; Yuan's step is published. "
        f"Claims: yuan-step-time, yuan-bubble. {count_bases(map(basis_of_record, shown))}"
    )
    return Drawing(ID, TITLE, caption.rstrip(), tuple(r.at for r in shown), missing, figure, SIMULATED)


def parts(record: Record) -> dict[str, float]:
    """Seconds by part, which add up to the step; finer where the record has them by kind."""
    metrics, series = record.metrics, record.series.seconds
    found = dict.fromkeys(COLOURS, 0.0)
    if series:
        for kind, seconds in series["busy"].items():
            found[KINDS.get(kind, "other operators")] += seconds
        for name, seconds in series["exposed"].items():
            group = next(
                (part for end, part in GROUPS.items() if name.endswith(end)), "waits for data parallelism"
            )
            found[group] += seconds
    else:
        found["compute"], found["optimizer"] = metrics["time.compute_s"], metrics["time.optimizer_s"]
        found["waits for communication"] = metrics["time.exposed_s"]
    found["bubble"] = max(0.0, metrics["step_seconds.median"] - sum(found.values()))
    return {name: seconds for name, seconds in found.items() if seconds}


def _shares(axes: Axes, records: dict[str, Record]) -> set[str]:
    """Draw one bar a layout; the names of its parts."""
    seen: set[str] = set()
    for y, record in enumerate(records.values()):
        found = parts(record)
        shares = {name: 100 * seconds / sum(found.values()) for name, seconds in found.items()}
        stacked(axes, y, shares, COLOURS, 0.62, across=True)
        seen |= set(found)
        words = units.seconds(record.metrics["step_seconds.median"])
        axes.annotate(words, (100, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(records)), list(records))
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the predicted step")
    quiet(axes, "x")
    return seen


def _yuan(axes: Axes, view: View, record: Record) -> set[str]:
    """Draw Yuan's step beside the published one; the names of its parts."""
    printed = view.row(STEP).row.printed
    assert printed is not None
    found, step = parts(record), record.metrics["step_seconds.median"]
    stacked(axes, 1, found, COLOURS, 0.6, across=False)
    axes.bar(0, printed.value, 0.6, facecolor="none", edgecolor=INK, lw=1.3)
    for x, value, words in ((0, printed.value, printed.text), (1, step, f"{step:.2f}")):
        axes.annotate(f"{words} s", (x, value), (0, 3), textcoords="offset points", ha="center", fontsize=8.5)
    off = f"{step / printed.value - 1:+.1%}".replace("-", "−")
    axes.set_xticks([0, 1], ["published", f"simulated\n({off})"])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(0, 1.14 * max(step, printed.value))
    axes.set_ylabel("seconds of a step")
    axes.set_title("Yuan 1.0, 2128 A100")
    quiet(axes, "y")
    return set(found)
