"""Tests of tables of results: each group has one suite and one kind of evidence, in a fixed order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from repro.config import EmulatedNetwork, Experiment, Layout, Model
from repro.results.schema import Record
from repro.results.select import Selection, select
from repro.results.tables import ComparableResults, comparable_results, matches_pattern, results_of_run
from tests.claims.constructed_records import comparison
from tests.records import made_up

SMALL = Model(name="small", layers=1, hidden=8, heads=1, vocab=16, seq=8)
LARGE = replace(SMALL, name="large", layers=2)
NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=1, between=8e6)


def record(
    name: str,
    rate: float | None = 1.0,
    *,
    model: Model = SMALL,
    network: EmulatedNetwork | None = None,
    **keys: Any,
) -> Record:
    layout = Layout() if network is None else Layout(dp=2)
    conditions = Experiment(name=name, model=model, layout=layout, network=network).as_dict()
    return made_up(
        name, experiment=conditions, metrics={} if rate is None else {"tokens_per_s": rate}, **keys
    )


def selection() -> Selection:
    """Return two suites, one with all three kinds of evidence, and comparisons inside and outside the suites."""
    names = {"b": 2.0, "a": 3.0, "d": 2.0, "slow": 0.5, "no speed": None}
    return select(
        [
            *(record(name, rate) for name, rate in names.items()),
            *(record("large", 9.0, model=LARGE), record("emulated", network=NETWORK)),
            *(record(name, evidence="simulated", network=NETWORK) for name in "ab"),
            *(record(name, suite="r") for name in "ac"),
            *(comparison("a", "b"), comparison("a", "elsewhere"), comparison("a", "c", suite="r")),
        ]
    )


def summaries(found: list[ComparableResults]) -> list[tuple[str, str, list[str], list[tuple[str, str]]]]:
    return [
        (
            group.suite,
            group.evidence,
            [record.name for record in group.records],
            [(compared.subject.name, compared.baseline.name) for compared in group.comparisons],
        )
        for group in found
    ]


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
