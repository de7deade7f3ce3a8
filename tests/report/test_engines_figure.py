"""Tests of the figure of engines: each bar is the value of one record at its strategy and engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import synthetic

from repro.config import Layout
from repro.report.figures import comparisons
from repro.report.figures.style import figure_style
from repro.results.measured import comparison_record, experiment_record

COMMON: dict[str, Any] = {"suite": "engines", "provenance": synthetic.PROVENANCE}
RELATIVE_STEP_TIMES = {"native": 1.0, "torch": 1.5, "megatron": 0.8}


def records(kind: str, names: tuple[str, ...], layout: Layout) -> tuple[list[Any], list[Any]]:
    """Return the runs of engines `names`, of which the first is native, and their comparisons with the first."""
    made = {
        name: replace(
            synthetic.experiment(f"speed-{name}-{kind}"),
            layout=layout,
            engine=name,
            training=synthetic.Training(steps=20, seq=32, dropout=0.0, attention_dropout=0.0),
        )
        for name in names
    }
    results = {name: synthetic.results(e, RELATIVE_STEP_TIMES[name]) for name, e in made.items()}
    ran = [experiment_record(e, results[name], wall_s=1.0, **COMMON) for name, e in made.items()]
    pairs = [
        comparison_record(made["native"], made[name], (results["native"], results[name]), **COMMON)
        for name in names[1:]
    ]
    return ran, pairs


@pytest.fixture(scope="module")
def drawing() -> Any:
    ran, pairs = records("z0", ("native", "torch"), Layout(dp=2))
    tp_runs, tp_comparisons = records("tp2", ("native", "torch", "megatron"), Layout(tp=2))
    with figure_style():
        return comparisons.draw_engines([*ran, *tp_runs], [*pairs, *tp_comparisons])


def test_each_bar_is_at_its_strategy_and_engine(drawing: Any) -> None:
    """Megatron-core has one bar, at TP, with its value above the bar."""
    times, states, sent = drawing.figure.axes
    order = [text.get_text() for text in times.get_xticklabels()]
    assert order == ["DP", "TP"]
    megatron = times.containers[-1]
    assert [order[round(bar.get_x() + bar.get_width() / 2)] for bar in megatron] == ["TP"]
    assert megatron[0].get_height() == pytest.approx(0.8, rel=0.05)
    labels = {round(float(note.get_text()), 1) for note in times.texts}
    assert {1.0, 1.5, 0.8} <= labels
    assert len(times.texts) == len(states.texts) == len(sent.texts) == 5


def test_missing_strategies_are_reported(drawing: Any) -> None:
    assert drawing.missing == comparisons.ENGINES.missing
    assert set(drawing.records) == {
        "engines/speed-native-z0",
        "engines/speed-torch-z0",
        *(f"engines/speed-{name}-tp2" for name in RELATIVE_STEP_TIMES),
    }
    with figure_style():
        assert comparisons.draw_engines([], []).figure is None
