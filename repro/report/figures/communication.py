"""Bytes that a rank sends in one step by ZeRO stage, relative to data parallelism."""

from __future__ import annotations

from typing import Any

from repro.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    STAGE,
    Drawing,
    Record,
    canvas,
    dp,
    quiet,
    succeeded,
    zero,
)

TITLE = "Communication volume by stage"
RUN = "repro run suites/smoke.toml"
PUBLISHED = {STAGE[0]: 1.0, STAGE[1]: 1.0, STAGE[2]: 1.0, STAGE[3]: 1.5, f"{STAGE[1]}, Feb 2020": 1.5}
"""1910.02054 sec. 7.1-7.2; the release of February 2020 reduced with an all-reduce, 3 Psi for 2 Psi."""
COLOURS = (BLUE, ORANGE, GREEN)


def draw(records: list[Record]) -> Drawing:
    """Bars: bytes counted where the collectives are called, ring algorithms.  Lines: the published ratio."""
    candidates = [
        r for r in succeeded(records, "states-") + succeeded(records, "comm-z1-allreduce") if dp(r) > 1
    ]
    base = {(_model(r), dp(r)): sent(r) for r in candidates if zero(r) == 0 and sent(r) > 0}
    shown = sorted((r for r in candidates if (_model(r), dp(r)) in base), key=lambda r: (_column(r), dp(r)))
    if not shown:
        return Drawing(
            "communication", TITLE, "No record of states-z0-dp2 and of stages to compare with it.", (), RUN
        )
    import pandas as pd
    import seaborn as sns

    degrees = sorted({dp(r) for r in shown})
    names = list(PUBLISHED)

    frame = pd.DataFrame(
        {
            "stage": [names[_column(r)] for r in shown],
            "ratio": [sent(r) / base[_model(r), dp(r)] for r in shown],
            "degree": [f"measured, Nd = {dp(r)}" for r in shown],
        }
    )
    figure, axes = canvas(3.3)
    look: dict[str, Any] = {"palette": COLOURS[: len(degrees)], "saturation": 1, "lw": 0, "gap": 0.08}
    sns.barplot(frame, x="stage", y="ratio", hue="degree", order=names, errorbar=None, ax=axes, **look)
    for bars in axes.containers:
        axes.bar_label(bars, fmt="%.4f", padding=3, fontsize=8)
    ends = ([place + side for place in range(len(names))] for side in (-0.45, 0.45))
    axes.hlines(list(PUBLISHED.values()), *ends, color=INK, lw=2, zorder=3, label="published")
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, 1.85), yticks=[0, 0.5, 1, 1.5])
    axes.set(xlabel="", ylabel="bytes sent, relative to DP")
    quiet(axes, "y")
    axes.legend(ncols=len(degrees) + 1, loc="upper left", bbox_to_anchor=(0, 1.12))

    caption = (
        "Bytes that one rank sends over the data-parallel group in one ordinary step, divided by those of "
        "plain data parallelism with the same model and Nd. Lines: the published 1x, 1x, 1x and 1.5x; the "
        "release of February 2020 sent 1.5x under P_os as well. Small collectives, such as that of the "
        "gradient norm, count."
    )
    return Drawing("communication", TITLE, caption, tuple(r.at for r in shown), _incomplete(shown), figure)


def sent(record: Record) -> float:
    """Bytes that rank 0 sends over the data-parallel group in one step."""
    return float(sum(row.sent_bytes for row in record.comm if row.group == "dp"))


def _model(record: Record) -> str:
    return record.experiment.model.name


def _column(record: Record) -> int:
    if record.experiment.layout.zero1_reduce == "all-reduce":
        return len(PUBLISHED) - 1
    return zero(record)


def _incomplete(shown: list[Record]) -> str:
    have = {(_column(r), dp(r)) for r in shown}
    return "" if {(column, nd) for column in range(len(PUBLISHED)) for nd in (2, 4)} <= have else RUN
