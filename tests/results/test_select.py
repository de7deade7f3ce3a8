"""Tests of selected records, one of each experiment, and of their tables by suite and kind of evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.validate.published import V100_ZERO, Point, family_statistics, points
from repro.claims.judge import judge
from repro.config import PROTOCOL, EmulatedNetwork, Layout, Model
from repro.results.metrics import DEVICE_FLOPS_PER_S
from repro.results.schema import ExperimentRecord, Record
from repro.results.select import Selection, by_key, by_keys, select
from repro.results.tables import ComparableResults, comparable_results, matches_pattern, results_of_run
from tests import committed
from tests.claims.constructed_records import SMALL, comparison, conditions
from tests.records import changed, made_up

SUITES = Path(__file__).parents[2] / "suites"


def run(day: int, outcome: str = "ok", **keys: Any) -> ExperimentRecord:
    return made_up("a", id=f"{day} {outcome}", written=f"2026-01-{day:02d}", outcome=outcome, **keys)


@pytest.mark.parametrize(
    ("records", "named", "keyed"),
    [
        ([run(1), run(2)], "2 ok", "2 ok"),
        ([run(2), run(1)], "2 ok", "2 ok"),
        ([run(1), run(2, "hang")], "1 ok", "2 hang"),
        ([run(1, "oom"), run(2, "hang")], "1 oom", "2 hang"),
        ([run(1, "hang"), run(2, "timeout")], "2 timeout", "2 timeout"),
        ([run(1), run(2, protocol=PROTOCOL + 1)], "1 ok", "1 ok"),
        ([run(1), run(2, protocol=None)], "1 ok", "1 ok"),
        ([run(1), run(2, evidence="simulated")], "1 ok", "1 ok"),
    ],
    ids=["newest", "any order", "failed again", "fits not", "failures", "protocol", "none", "evidence"],
)
def test_newest_conclusive_record_counts(records: list[ExperimentRecord], named: str, keyed: str) -> None:
    assert [record.id for record in select(records).measured] == [named]
    assert by_key(records)["k"].id == keyed


def test_omitted_records_are_counted() -> None:
    compared = [
        changed(comparison("subject", "baseline", float(day)), written=f"2026-01-{day:02d}")
        for day in (1, 2, 3)
    ]
    all_records = [run(1), run(2), run(3, "hang"), run(4, protocol=-1)]
    all_records += [*compared[:2], changed(compared[2], protocol=-1)]
    chosen = select(all_records)
    assert (chosen.older, chosen.foreign) == (3, 2)
    assert [record.ratio for record in chosen.comparisons] == [2]
    assert chosen.by_pair["s/subject", "s/baseline"].ratio == 2
    interrupted = run(1, "error"), run(2, "interrupted")
    assert by_key(interrupted, without=("interrupted",))["k"].id == "1 error"
    assert by_keys(all_records)["baseline", "subject"].ratio == 2


def test_validation_ignores_records_of_another_protocol() -> None:
    entry = committed.suite(SUITES / "zero_throughput.toml").entry("fig2-8b-megatron")
    keys = {"suite": "zero_throughput", "evidence": "simulated", "experiment": entry.experiment.as_dict()}
    ours, other = (
        made_up(
            "fig2-8b-megatron", **keys, written=f"2026-01-0{day}", metrics={DEVICE_FLOPS_PER_S: day * 1e12}
        )
        for day in (1, 2)
    )
    other = changed(other, protocol=PROTOCOL + 1)
    found = points(judge(committed.ledger(), [ours, other]), [ours, other])
    assert {point.device_flops for point in found if point.kind == "rate"} == {1e12}


def test_predictions_within_25_percent_are_close() -> None:
    """Predictions of 75 % to 125 % of the published rate are close; the median error is of absolute values."""
    words = {"claim": "c", "label": "x", "kind": "rate", "family": V100_ZERO, "unit": "TFLOP/s"}
    all_points = []
    for factor in (0.5, 0.75, 1.0, 1.25, 1.26, 9.0):
        ends = {"low": 4.0 * factor, "high": 4.0 * factor + 1, "holds": factor <= 1 <= factor + 0.25}
        numbers = {"published": 4.0, "predicted": 4.0 * factor, "factor": factor, "device_flops": 0.0, **ends}
        left_out = "a bound" if factor == 9 else ""
        all_points.append(Point(**words, **numbers, runs=("s/a",), certainty="confirmed", left_out=left_out))
    found = family_statistics(all_points)
    assert [(one.name, one.points, one.close) for one in found] == [(V100_ZERO, 5, 3), ("all rates", 5, 3)]
    assert (found[0].median, found[0].worst.error) == (pytest.approx(0.25), -0.5)
    assert found[0].held == 2, "intervals from 0.75 to 1 and from 1 to 1.25 contain the published rate"


LARGE = replace(SMALL, name="large", layers=3)
NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=1, between=8e6)


def record(
    name: str, rate: float = 1.0, *, model: Model = SMALL, emulated: bool = False, **keys: Any
) -> Record:
    """Return a record of an experiment, on an emulated network if `emulated`; a rate of 0 is missing."""
    layout, network = (Layout(dp=2), NETWORK) if emulated else (Layout(), None)
    experiment = conditions(layout, model, network=network)
    metrics = {"tokens_per_s": rate} if rate else {}
    return made_up(name, experiment=experiment, metrics=metrics, **keys)


def selection() -> Selection:
    """Return two suites, one with all three kinds of evidence, and comparisons inside and outside the suites."""
    names = {"b": 2.0, "a": 3.0, "d": 2.0, "slow": 0.5, "no speed": 0}
    return select(
        [
            *(record(name, rate) for name, rate in names.items()),
            *(record("large", 9.0, model=LARGE), record("emulated", emulated=True)),
            *(record(name, evidence="simulated", emulated=True) for name in "ab"),
            *(record(name, suite="r") for name in "ac"),
            *(comparison("a", "b"), comparison("a", "elsewhere"), comparison("a", "c", suite="r")),
        ]
    )


def summaries(groups: list[ComparableResults]) -> list[tuple[str, str, list[str], list[tuple[str, str]]]]:
    found = []
    for group in groups:
        names = [record.name for record in group.records]
        pairs = [(compared.subject.name, compared.baseline.name) for compared in group.comparisons]
        found.append((group.suite, group.evidence, names, pairs))
    return found


def test_groups_and_their_records_have_a_fixed_order() -> None:
    """Records are sorted by model size, then by decreasing speed, then by name."""
    assert summaries(comparable_results(selection())) == [
        ("r", "measured", ["a", "c"], [("a", "c")]),
        ("s", "measured", ["a", "b", "d", "slow", "no speed", "large"], [("a", "b")]),
        ("s", "emulated", ["emulated"], []),
        ("s", "simulated", ["a", "b"], []),
    ]


def test_patterns_match_suites_or_names() -> None:
    assert [matches_pattern(pattern, "s", "ab") for pattern in ("", "s", "a?", "s/a*", "r", "b*", "r/ab")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip
    assert summaries(comparable_results(selection(), "r/a")) == [("r", "measured", ["a"], [])]


def test_results_of_a_run_have_its_experiments_and_comparisons() -> None:
    names = ["a", "c", "emulated", "elsewhere"]
    assert summaries(results_of_run(selection(), "s", names, "measured")) == [
        ("s", "measured", ["a"], []),
        ("s", "emulated", ["emulated"], []),
    ]
    assert summaries(results_of_run(selection(), "s", ["a", "b"], "measured")) == [
        ("s", "measured", ["a", "b"], [("a", "b")])
    ]
    assert summaries(results_of_run(selection(), "s", names, "simulated")) == [("s", "simulated", ["a"], [])]
