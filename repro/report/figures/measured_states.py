"""Memory of model states by ZeRO stage and Nd, stacked by part, with the paper's formulas on top."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from repro.report.figures.style import (
    CATEGORY,
    INK,
    MUTED,
    STAGE,
    Drawing,
    Record,
    accounted,
    canvas,
    dp,
    quiet,
    stacked,
    succeeded,
    zero,
)
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "states-"
PARTS = ("parameters", "gradients", "optimizer")
LOOK = {part: CATEGORY[part] for part in PARTS}
TITLE = "Memory of model states by stage and Nd"
RUN = "repro run suites/smoke.toml --only 'states-*'"
FORMULA = {0: "16Ψ", 1: "4Ψ + 12Ψ/Nd", 2: "2Ψ + 14Ψ/Nd", 3: "16Ψ/Nd"}


def bytes_per_parameter(stage: int, nd: int) -> float:
    """Model-state bytes per parameter and device, mixed-precision Adam, K = 12 (1910.02054 sec. 5.1-5.3)."""
    return {0: 16.0, 1: 4 + 12 / nd, 2: 2 + 14 / nd, 3: 16 / nd}[stage]


def draw(records: list[Record]) -> Drawing:
    """Bars: bytes measured from storages, largest rank, per parameter.  Diamonds: the formula."""
    shown = [r for r in succeeded(records, PREFIX) if accounted(r) and _precision(r) != "fp32"]
    models = Counter(r.experiment.model.name for r in shown)
    if not shown:
        return Drawing("states", TITLE, "No record of a states-* experiment.", (), RUN)
    model = models.most_common(1)[0][0]  # one Psi for all bars
    shown = sorted((r for r in shown if r.experiment.model.name == model), key=lambda r: (dp(r), zero(r)))
    psi = shown[0].metrics["parameters"]
    degrees = sorted({dp(r) for r in shown})

    figure, axes = canvas(3.7)
    for record in shown:
        x = _place(degrees, record)
        parts = {part: record.metrics[f"memory.{part}_bytes"] / psi for part in PARTS}
        base = stacked(axes, x, parts, LOOK, 0.8, across=False)
        axes.annotate(f"{base:.2f}", (x, base), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        formula = bytes_per_parameter(zero(record), dp(record))
        axes.plot(
            x, formula, marker="D", color="white", markeredgecolor=INK, markersize=5.5, linestyle="none"
        )
    axes.set_xticks([_place(degrees, r) for r in shown], [STAGE[zero(r)] for r in shown])
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
    quiet(axes, "y")
    _legend(axes, "/".join(sorted({_precision(r) for r in shown})))

    worst = max(abs(_measured(r, psi) / bytes_per_parameter(zero(r), dp(r)) - 1) for r in shown)
    caption = (
        f"Persistent model states of {model} between steps, measured from the tensors' storages on the rank "
        f"that holds most. Diamonds: {', '.join(FORMULA.values())} with K = 12 (ZeRO paper, sec. 5). "
    )
    if worst:
        caption += f"Largest difference between bar and diamond: {units.number(100 * worst)} %; "
        caption += "shards are padded to equal sizes."
    else:
        caption += "Bars and diamonds are equal to the byte."
    return Drawing("states", TITLE, caption, tuple(r.at for r in shown), _incomplete(shown), figure)


def _measured(record: Record, psi: float) -> float:
    return record.metrics["memory.states_bytes"] / psi


def _precision(record: Record) -> str:
    return record.experiment.layout.precision


def _place(degrees: list[int], record: Record) -> float:
    return 5 * degrees.index(dp(record)) + zero(record)


def _legend(axes: Axes, precision: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {
        "parameters": f"parameters ({precision})",
        "gradients": f"gradients ({precision})",
        "optimizer": "optimizer (fp32 master, m, v)",
    }
    handles: list[Patch | Line2D] = [Patch(color=CATEGORY[part], label=names[part]) for part in PARTS]
    handles.append(
        Line2D([], [], marker="D", color="white", markeredgecolor=INK, linestyle="none", label="formula")
    )
    axes.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.1))


def _incomplete(shown: list[Record]) -> str:
    have = {(zero(r), dp(r)) for r in shown}
    return "" if {(stage, nd) for stage in range(4) for nd in (1, 2, 4)} <= have else RUN
