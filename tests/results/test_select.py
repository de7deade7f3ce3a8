"""One record of each experiment counts, and every reader means the same one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.validate.published import V100_ZERO, Point, family_statistics, points
from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.config import PROTOCOL, suites
from repro.results.schema import ComparisonRecord, ExperimentRecord, Side
from repro.results.select import by_key, by_keys, select
from tests.records import changed, made_up

SUITES = Path(__file__).parents[2] / "suites"


def at(day: int, outcome: str = "ok", **keys: Any) -> ExperimentRecord:
    return made_up("a", id=f"{day} {outcome}", written=f"2026-01-{day:02d}", outcome=outcome, **keys)


def compared(day: int, **keys: Any) -> ComparisonRecord:
    sides = {name: Side(name=name, key=f"key of {name}") for name in ("baseline", "subject")}
    numbers = {"metric": "samples_per_s", "ratio": float(day), "low": None, "high": None, "rounds": 2}
    plain = ComparisonRecord(suite="s", name="x", written=f"2026-01-{day:02d}", **sides, **numbers)
    return changed(plain, **keys)


@pytest.mark.parametrize(
    ("records", "named", "keyed"),
    [
        ([at(1), at(2)], "2 ok", "2 ok"),
        ([at(2), at(1)], "2 ok", "2 ok"),
        ([at(1), at(2, "hang")], "1 ok", "2 hang"),
        ([at(1, "oom"), at(2, "hang")], "1 oom", "2 hang"),
        ([at(1, "hang"), at(2, "timeout")], "2 timeout", "2 timeout"),
        ([at(1), at(2, protocol=PROTOCOL + 1)], "1 ok", "1 ok"),
        ([at(1), at(2, protocol=None)], "1 ok", "1 ok"),
        ([at(1), at(2, evidence="simulated")], "1 ok", "1 ok"),
    ],
    ids=["newest", "any order", "failed again", "fits not", "failures", "protocol", "none", "evidence"],
)
def test_the_record_that_counts(records: list[ExperimentRecord], named: str, keyed: str) -> None:
    assert [record.id for record in select(records).measured] == [named]
    assert by_key(records)["k"].id == keyed


def test_what_is_left_out_is_counted() -> None:
    every = [at(1), at(2), at(3, "hang"), at(4, protocol=-1)]
    every += [compared(1), compared(2), compared(3, protocol=-1)]
    chosen = select(every)
    assert (chosen.older, chosen.foreign) == (3, 2)
    assert [record.ratio for record in chosen.comparisons] == [2]
    assert chosen.by_pair["s/subject", "s/baseline"].ratio == 2
    assert by_keys(every)["key of baseline", "key of subject"].ratio == 2


def test_an_outcome_may_be_passed_over() -> None:
    assert by_key([at(1, "error"), at(2, "interrupted")], without=("interrupted",))["k"].id == "1 error"


def test_a_published_value_is_not_held_against_a_record_of_another_protocol() -> None:
    """`repro validate` once gave the FLOP/s of the newest record of any protocol."""
    name = "fig2-8b-megatron"
    (entry,) = (
        e for e in suites.load_suite(SUITES / "zero_throughput.toml").entries if e.experiment.name == name
    )
    run = {"suite": "zero_throughput", "evidence": "simulated", "experiment": entry.experiment.as_dict()}
    rates = {day: {"hardware_flops_per_s.device": day * 1e12} for day in (1, 2)}
    ours = made_up(name, **run, written="2026-01-01", metrics=rates[1])
    other = made_up(name, **run, written="2026-01-02", metrics=rates[2], protocol=PROTOCOL + 1)
    found = points(judge(load_ledger(), [ours, other]), [ours, other])
    assert {point.device_flops for point in found if point.kind == "rate"} == {1e12}


def test_a_prediction_is_close_from_either_side() -> None:
    """Within 25 % of the published rate; one that is half as fast is as far off as one half as fast again."""
    errors = (-0.5, -0.25, 0.0, 0.25, 0.26)
    found = family_statistics(
        [point(1 + error) for error in errors] + [replace(point(9.0), left_out="a bound")]
    )
    assert [(family.name, family.points, family.close) for family in found] == [
        (V100_ZERO, 5, 3),
        ("all rates", 5, 3),
    ]
    assert found[0].median == pytest.approx(0.25)
    assert found[0].worst.error == -0.5
    assert found[0].held == 2, "0.75 to 1 and 1 to 1.25 of what was published"


def point(factor: float) -> Point:
    ends = {"low": 4.0 * factor, "high": 4.0 * factor + 1, "holds": factor <= 1 <= factor + 0.25}
    numbers = {"published": 4.0, "predicted": 4.0 * factor, "factor": factor, "device_flops": 0.0, **ends}
    words = {"claim": "c", "label": "x", "kind": "rate", "family": V100_ZERO, "unit": "TFLOP/s"}
    return Point(**words, **numbers, runs=("s/a",), certainty="confirmed")
