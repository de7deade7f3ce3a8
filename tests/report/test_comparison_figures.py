"""Tests of figures of alternately run experiments: engines by strategy, and twins over emulated bandwidths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from repro.config import EmulatedNetwork, Experiment, Layout, TwinOf
from repro.config.experiment import TWIN_RATIO
from repro.report.figures import comparisons
from repro.results.measured import comparison_record, experiment_record
from tests.report import synthetic

pytestmark = pytest.mark.usefixtures("report_style")


def compared(suite: str, runs: list[tuple[Experiment, float]]) -> tuple[list[Any], list[Any]]:
    """Return the records of experiments with these relative step times, and their comparisons with the first."""
    common: dict[str, Any] = {"suite": suite, "provenance": synthetic.PROVENANCE}
    results = [synthetic.results(e, seconds) for e, seconds in runs]
    made = [e for e, _ in runs]
    records = [
        experiment_record(e, found, wall_s=1.0, **common) for e, found in zip(made, results, strict=True)
    ]
    pairs = zip(made[1:], results[1:], strict=True)
    return records, [comparison_record(made[0], e, (results[0], found), **common) for e, found in pairs]


def test_each_bar_is_at_its_strategy_and_engine() -> None:
    """Megatron-core has one bar, at TP, with its value above the bar."""
    step_times = {"native": 1.0, "torch": 1.5, "megatron": 0.8}
    training = synthetic.Training(steps=20, seq=32, dropout=0.0, attention_dropout=0.0)

    def records(kind: str, names: list[str], layout: Layout) -> tuple[list[Any], list[Any]]:
        made = {name: synthetic.experiment(f"speed-{name}-{kind}") for name in names}
        return compared(
            "engines",
            [
                (replace(e, layout=layout, engine=name, training=training), step_times[name])
                for name, e in made.items()
            ],
        )

    runs, pairs = records("z0", ["native", "torch"], Layout(dp=2))
    tp_runs, tp_pairs = records("tp2", [*step_times], Layout(tp=2))
    drawing: Any = comparisons.draw_engines([*runs, *tp_runs], [*pairs, *tp_pairs])
    times, states, sent = drawing.figure.axes
    order = [text.get_text() for text in times.get_xticklabels()]
    assert order == ["DP", "TP"]
    megatron = times.containers[-1]
    assert [order[round(bar.get_x() + bar.get_width() / 2)] for bar in megatron] == ["TP"]
    assert megatron[0].get_height() == pytest.approx(0.8, rel=0.05)
    assert {1.0, 1.5, 0.8} <= {round(float(note.get_text()), 1) for note in times.texts}
    assert len(times.texts) == len(states.texts) == len(sent.texts) == 5
    assert drawing.missing == comparisons.ENGINES.missing, "some strategies have no record"
    assert set(drawing.records) == {record.label for record in [*runs, *tp_runs]}


RATES = {1.2: 2.0, 4.8: 3.0, 19.2: 2.5}
"""Measured ratio of a pair of twins, by the bandwidth of the originals' link in GB/s."""


def twins(suite: str, link: str, rate: float, ratio: float) -> tuple[list[Any], list[Any]]:
    """Return a pair of twins for `rate` GB/s, whose subject is `ratio` times as fast, and their comparison."""
    sides = {"between": 4.8e9, "within": 6e9, link: rate * 1e9}
    within = 1e7 if suite == comparisons.LARGER_TWIN_SUITE else 0.0
    network = EmulatedNetwork(nodes=2, ranks_per_node=1, between=1e7 * rate, within=within)
    predicted = {TWIN_RATIO: (ratio + 0.1, ratio + 0.2)}
    pair = [
        replace(
            synthetic.experiment(f"{name}-{link}{rate}"),
            layout=Layout(dp=2, zero=zero),
            network=network,
            twin=TwinOf(original=name, part=0.2, numbers=predicted if zero else {}, **sides),
        )
        for name, zero in (("megatron", 0), ("deepspeed", 1))
    ]
    return compared(suite, [(pair[0], ratio), (pair[1], 1.0)])


def drawn(*pairs: tuple[list[Any], list[Any]]) -> Any:
    runs, turns = ([one for pair in pairs for one in pair[side]] for side in (0, 1))
    return comparisons.draw_bandwidth_sweeps(runs, turns, published=3.75)


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line.get_xydata() for line in axes.lines}


def test_ratios_of_twins_are_at_the_link_bandwidth_of_their_originals() -> None:
    outside = [twins("windtunnel_between", "between", rate, ratio) for rate, ratio in RATES.items()]
    larger = twins(comparisons.LARGER_TWIN_SUITE, "between", 4.8, 3.2)
    drawing = drawn(*reversed(outside), larger)
    (axes,) = drawing.figure.axes
    found = lines(axes)
    assert found["measured, twins"][:, 0] == pytest.approx(list(RATES))
    assert found["measured, twins"][:, 1] == pytest.approx(list(RATES.values()), rel=0.05)
    assert found["predicted, originals"][:, 1] == pytest.approx([2.1, 3.1, 2.6])
    assert found["predicted, twins"][:, 1] == pytest.approx([2.2, 3.2, 2.7])
    assert found["a larger twin"][0] == pytest.approx([4.8, 3.2], rel=0.05)
    assert found["published"].tolist() == [[4.8, 3.75]]
    assert "windtunnel_within" in drawing.missing
    assert len(drawing.records) == 4
    inside = [twins("windtunnel_within", "within", rate, ratio) for rate, ratio in RATES.items()]
    drawing = drawn(*outside, *inside, larger)
    assert (len(drawing.figure.axes), drawing.missing) == (2, "")
    assert "published" not in lines(drawing.figure.axes[1]), "no published value at this link"
    assert drawn(outside[0]) is comparisons.BANDWIDTHS, "a single point is no sweep"
