"""What stands beside each other: one suite and one kind of evidence, in an order that a reader can rely on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from repro.config import EmulatedNetwork, Experiment, Layout, Model
from repro.results.interval import Sensitivity
from repro.results.schema import ComparisonRecord, Record, Side
from repro.results.select import Selection, select
from repro.results.tables import ComparableResults, comparable_results, matches_pattern, results_of_run
from tests.records import made_up

SMALL = Model(name="small", layers=1, hidden=8, heads=1, vocab=16, seq=8)
LARGE = replace(SMALL, name="large", layers=2)
NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=1, between=8e6)


def one(
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


def turns(subject: str, baseline: str, suite: str = "s") -> ComparisonRecord:
    sides = {"subject": Side(name=subject, key=subject), "baseline": Side(name=baseline, key=baseline)}
    return ComparisonRecord(
        suite=suite, name="turns", metric="samples_per_s", ratio=2.0, low=None, high=None, rounds=2, **sides
    )


def store() -> Selection:
    """Two suites, one of them with all three kinds of evidence, and comparisons within and across."""
    return select(
        [
            one("b", 2.0),
            one("a", 3.0),
            one("d", 2.0),
            one("slow", 0.5),
            one("no speed", None),
            one("large", 9.0, model=LARGE),
            one("emulated", network=NETWORK),
            one("a", evidence="simulated"),
            one("b", evidence="simulated"),
            one("a", suite="r"),
            one("c", suite="r"),
            turns("a", "b"),
            turns("a", "elsewhere"),
            turns("a", "c", suite="r"),
        ]
    )


def shown(found: list[ComparableResults]) -> list[tuple[str, str, list[str], list[tuple[str, str]]]]:
    return [
        (
            group.suite,
            group.evidence,
            [record.name for record in group.records],
            [(compared.subject.name, compared.baseline.name) for compared in group.comparisons],
        )
        for group in found
    ]


def test_groups_are_in_order_and_so_is_what_is_in_them() -> None:
    """The smallest model first, of each the fastest, of equals by name; what took turns did run."""
    assert shown(comparable_results(store())) == [
        ("r", "measured", ["a", "c"], [("a", "c")]),
        ("s", "measured", ["a", "b", "d", "slow", "no speed", "large"], [("a", "b")]),
        ("s", "emulated", ["emulated"], []),
        ("s", "simulated", ["a", "b"], []),
    ]


def test_a_pattern_takes_a_suite_or_names() -> None:
    assert [matches_pattern(pattern, "s", "ab") for pattern in ("", "s", "a?", "s/a*", "r", "b*", "r/ab")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip
    assert shown(comparable_results(store(), "r/a")) == [("r", "measured", ["a"], [])]


def test_a_run_is_shown_what_came_of_it() -> None:
    names = ["a", "c", "emulated", "elsewhere"]
    assert shown(results_of_run(store(), "s", names, "measured")) == [
        ("s", "measured", ["a"], []),
        ("s", "emulated", ["emulated"], []),
    ]
    assert shown(results_of_run(store(), "s", ["a", "b"], "measured")) == [
        ("s", "measured", ["a", "b"], [("a", "b")])
    ]
    assert shown(results_of_run(store(), "s", names, "simulated")) == [("s", "simulated", ["a"], [])]


def test_the_span_of_an_unknown_number_is_between_its_two_steps() -> None:
    ends = {"key": "k", "low": 1.0, "best": 2.0, "high": 3.0}
    assert [Sensitivity(**ends, low_s=low, high_s=high).span for low, high in ((2.0, 5.0), (5.0, 2.0))] == [
        3.0,
        3.0,
    ]
