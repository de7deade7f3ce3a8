"""Figures of model-state memory by ZeRO stage: measured states, and ZeRO's Figure 1 with its published totals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from repro.report.figures.style import (
    CATEGORY_COLOURS,
    INK,
    MUTED,
    STAGE_NAMES,
    Drawing,
    Record,
    dp_degree,
    draw_stacked_bar,
    has_memory_categories,
    make_axes,
    set_grid,
    successful_records,
    zero_stage,
)
from repro.report.figures.values import Value, View
from repro.results.schema import SIMULATED
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes


STATES_PREFIX = "states-"
STATE_PARTS = ("parameters", "gradients", "optimizer")
PART_COLOURS = {part: CATEGORY_COLOURS[part] for part in STATE_PARTS}
MEASURED_TITLE = "Memory of model states by stage and Nd"
MEASURED_COMMAND = "repro run suites/smoke.toml --only 'states-*'"
STAGE_FORMULAS = {0: "16Ψ", 1: "4Ψ + 12Ψ/Nd", 2: "2Ψ + 14Ψ/Nd", 3: "16Ψ/Nd"}


def bytes_per_parameter(stage: int, nd: int) -> float:
    """Return the model-state bytes per parameter and device, mixed-precision Adam, K = 12 (1910.02054 sec. 5.1-5.3)."""
    return {0: 16.0, 1: 4 + 12 / nd, 2: 2 + 14 / nd, 3: 16 / nd}[stage]


def draw_measured_states(records: list[Record]) -> Drawing:
    """Draw measured bytes of storages per parameter on the largest rank (bars), and the formula (diamonds)."""
    shown = [
        r
        for r in successful_records(records, STATES_PREFIX)
        if has_memory_categories(r) and _precision(r) != "fp32"
    ]
    models = Counter(r.experiment.model.name for r in shown)
    if not shown:
        return Drawing("states", MEASURED_TITLE, "No record of a states-* experiment.", (), MEASURED_COMMAND)
    model = models.most_common(1)[0][0]  # one Psi for all bars
    shown = sorted(
        (r for r in shown if r.experiment.model.name == model), key=lambda r: (dp_degree(r), zero_stage(r))
    )
    psi = shown[0].metrics["parameters"]
    degrees = sorted({dp_degree(r) for r in shown})

    figure, axes = make_axes(3.7)
    for record in shown:
        x = _bar_position(degrees, record)
        parts = {part: record.metrics[f"memory.{part}_bytes"] / psi for part in STATE_PARTS}
        base = draw_stacked_bar(axes, x, parts, PART_COLOURS, 0.8, across=False)
        axes.annotate(f"{base:.2f}", (x, base), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        formula = bytes_per_parameter(zero_stage(record), dp_degree(record))
        axes.plot(
            x, formula, marker="D", color="white", markeredgecolor=INK, markersize=5.5, linestyle="none"
        )
    axes.set_xticks([_bar_position(degrees, r) for r in shown], [STAGE_NAMES[zero_stage(r)] for r in shown])
    for degree in degrees:
        middle = 5 * degrees.index(degree) + 1.5
        at = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "weight": "bold"}
        axes.text(middle, -0.14, f"Nd = {degree}", **at)
    axes.set_ylabel("bytes per parameter and rank")
    axes.set_ylim(0, 19.5)
    axes.set_yticks(range(0, 17, 4))
    right = axes.secondary_yaxis("right", functions=(lambda y: y * psi / 1e6, lambda y: y * 1e6 / psi))
    right.set_ylabel(f"MB per rank (Ψ = {psi:,.0f})")
    right.spines["right"].set_visible(True)
    right.spines["right"].set_color(MUTED)
    set_grid(axes, "y")
    _draw_states_legend(axes, "/".join(sorted({_precision(r) for r in shown})))

    worst = max(
        abs(_measured_bytes_per_parameter(r, psi) / bytes_per_parameter(zero_stage(r), dp_degree(r)) - 1)
        for r in shown
    )
    caption = (
        f"Persistent model states of {model} between steps, measured from the tensors' storages on the rank "
        f"that holds most. Diamonds: {', '.join(STAGE_FORMULAS.values())} with K = 12 (ZeRO paper, sec. 5). "
    )
    if worst:
        caption += f"Largest difference between bar and diamond: {units.number(100 * worst)} %; "
        caption += "shards are padded to equal sizes."
    else:
        caption += "Bars and diamonds are equal to the byte."
    return Drawing(
        "states", MEASURED_TITLE, caption, tuple(r.label for r in shown), _missing_command(shown), figure
    )


def _measured_bytes_per_parameter(record: Record, psi: float) -> float:
    return record.metrics["memory.states_bytes"] / psi


def _precision(record: Record) -> str:
    return record.experiment.layout.precision


def _bar_position(degrees: list[int], record: Record) -> float:
    return 5 * degrees.index(dp_degree(record)) + zero_stage(record)


def _draw_states_legend(axes: Axes, precision: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {
        "parameters": f"parameters ({precision})",
        "gradients": f"gradients ({precision})",
        "optimizer": "optimizer (fp32 master, m, v)",
    }
    handles: list[Patch | Line2D] = [
        Patch(color=CATEGORY_COLOURS[part], label=names[part]) for part in STATE_PARTS
    ]
    handles.append(
        Line2D([], [], marker="D", color="white", markeredgecolor=INK, linestyle="none", label="formula")
    )
    axes.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.1))


def _missing_command(shown: list[Record]) -> str:
    have = {(zero_stage(r), dp_degree(r)) for r in shown}
    return "" if {(stage, nd) for stage in range(4) for nd in (1, 2, 4)} <= have else MEASURED_COMMAND


PUBLISHED_ID, PUBLISHED_TITLE = "zero-fig1", "ZeRO, Figure 1: model states of 7.5B on 64 GPUs"
PUBLISHED_ROWS = "zero-fig1-7p5b/*"
PUBLISHED_COMMAND = "repro run suites/zero_memory.toml --evidence simulated --only '7.5b-z*-n64'"


def draw_published_states(view: View, simulated: list[Record]) -> Drawing:
    """Draw bytes of the simulated step by part (bars), the published bytes (outline), and the formula (diamond)."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    values = view.matching(PUBLISHED_ROWS)
    records = {record.label: record for record in simulated}
    figure, axes = make_axes(3.6)
    drawn: list[str] = []
    for y, value in enumerate(values):
        printed, ours, formula = value.published, value.of_kind(SIMULATED), value.of_kind("analytic")
        assert printed is not None
        record = records.get(ours.runs[0]) if ours else None
        if record:
            drawn.append(record.label)
            sizes = {part: record.metrics[f"memory.{part}_bytes"] / units.GB for part in STATE_PARTS}
            draw_stacked_bar(axes, y, sizes, PART_COLOURS, 0.56, across=True)
        axes.barh(y, printed.value, 0.74, facecolor="none", edgecolor=INK, lw=1.3, zorder=3)
        if formula:
            axes.scatter(formula.value, y, s=30, marker="D", color=INK, edgecolors="white", lw=0.8, zorder=4)
        end = max([printed.value, *(found.value for found in value.ours)])
        axes.annotate(
            _value_label(value), (end, y), (9, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axes.set_yticks(range(len(values)), [f"{STAGE_NAMES[stage]}" for stage in range(len(values))])
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(0, 1.5 * max(value.published.high for value in values if value.published))
    axes.set_xlabel("GB per GPU")
    set_grid(axes, "x")
    handles = (
        [Patch(facecolor=CATEGORY_COLOURS[part], label=f"{part}, simulated") for part in STATE_PARTS]
        if drawn
        else []
    )
    handles.append(Patch(facecolor="none", edgecolor=INK, label="published"))
    diamond = Line2D(
        [], [], marker="D", color=INK, linestyle="none", markersize=5, label="formula (analytic)"
    )
    figure.legend(handles=[*handles, diamond], loc="outside upper center", ncols=5)
    caption = (
        "Bytes of model states on one GPU, Ψ = 7.5e9, Nd = 64, K = 12. Bars are counted on the tensors of the real "
        "step, run on shapes; the formulas are those of sections 5.1 to 5.3. Claim: zero-fig1-7p5b."
    )
    missing = PUBLISHED_COMMAND if len(drawn) < len(values) else ""
    return Drawing(PUBLISHED_ID, PUBLISHED_TITLE, caption, tuple(drawn), missing, figure, SIMULATED)


def _value_label(value: Value) -> str:
    parts = [f"published {value.published.text if value.published else ''}"]
    for kind, digits in ((SIMULATED, 4), ("analytic", 4)):
        found = value.of_kind(kind)
        parts.append(f"{kind} {found.value:.{digits}g}" if found else f"{kind}: not run")
    return ", ".join(parts)
