"""Tests of record selection: one record of each experiment is selected, by every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.validate.published import V100_ZERO, Point, family_statistics, points
from repro.claims.judge import judge
from repro.config import PROTOCOL
from repro.results.metrics import DEVICE_FLOPS_PER_S
from repro.results.schema import ExperimentRecord
from repro.results.select import by_key, by_keys, select
from tests import committed
from tests.claims.constructed_records import comparison
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
