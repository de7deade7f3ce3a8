"""Tests of margins: the change of a value that changes its verdict, and tests that are weak."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from repro.claims.headlines import describe_margin, describe_strength
from repro.claims.judge import judge
from repro.claims.table import totals
from repro.claims.tolerance import AcceptedRange
from repro.claims.verdicts import REPRODUCED, RowResult
from tests.claims.constructed_records import HEAD, judged, record, row, value, write_ledger
from tests.records import made_up

SPEED = value('metric("s/full", "speed")')
TWIN = value('metric("s/full", "speed")', 'expect = "3", scale = "scaled twin", metric = "parity"')


def row_result(folder: Path, speed: float, published: str = "2.0", **keys: str) -> RowResult:
    """Return the result of a row with the TOML texts `keys` for a measured `speed`."""
    return judged(folder, row(published, measured=SPEED, **keys), record("full", speed=speed)).rows[0]


def test_margin_by_kind_of_statement(tmp_path: Path) -> None:
    for published, keys, speed, margin, is_weak, shown in (
        # 12 % on both sides of 2.0; the value is 0.1 above 2.0.
        ("2.0", {}, 2.1, ((2.1 - 1.76) / 2, (2.24 - 2.1) / 2), False, "-17 +7"),
        # 15 % on both sides: a value at one end may change by 30 % towards the other end.
        ("2.0", {"metric": '"time"', "unit": '"s"'}, 1.71, (0.005, 0.295), True, "-0.5 +29.5"),
        # A bound has one end; the value may be far from the bound.
        ("2", {"bound": '"over"'}, 3.0, (0.5, inf), True, "-50"),
        ("2", {"bound": '"under"'}, 1.6, (inf, 0.2), False, "+20"),
        # An exact value has no tolerance.
        ("2", {"metric": '"exact"'}, 2.0, (0.0, 0.0), False, "0"),
        # A margin relative to the published number 0 is infinite.
        ("0", {"metric": '"share"', "unit": '"%"'}, 0.01, (inf, inf), True, "–"),
    ):
        found = row_result(tmp_path, speed, published, **keys)
        assert found.verdict == REPRODUCED
        assert found.margin == pytest.approx(margin)
        assert (bool(found.weakness), describe_margin(found)) == (is_weak, shown)


def test_margin_of_two_values_a_scaled_twin_and_an_interval(tmp_path: Path) -> None:
    """The margin of a scaled twin is relative to its formula. Of two values, the smaller margin counts at each end."""
    both = row(measured=f"[{SPEED}, {SPEED.replace('full', 'other')}]")
    two = judged(tmp_path, both, record("full", speed=2.1), record("other", speed=1.9)).rows[0]
    assert two.margin == pytest.approx((0.07, 0.07))
    found = judged(tmp_path, row(measured=TWIN), record("full", speed=3.0)).rows[0]
    assert found.margin == pytest.approx((1e-5, 1e-5))
    assert AcceptedRange(10, 20, False, False, "").margin(9, 12, 10) == pytest.approx((0.2, 1.1))


def test_margin_of_a_limit_ends_at_the_next_size(tmp_path: Path) -> None:
    """Accepted limits are 12.5B, half a digit below 13B, to 20B, the next size that the source tried."""
    rows = row("13B", unit='"parameters"', metric='"limit"', measured=SPEED)
    ledger = write_ledger(tmp_path, rows, HEAD.replace("rows = [", 'steps = ["13B", "20B"]\nrows = ['))
    found = judge(ledger, [record("full", speed=13e9)])[0].rows[0]
    assert found.margin == pytest.approx((0.5 / 13, 7 / 13))
    assert describe_strength(found) == (
        "Margin -3.85 +53.8 %. Weak: the verdict also holds for values that are more than 25% off."
    )


def test_simulated_value_that_no_mutation_changes_is_weak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured value needs no mutation."""
    blind = "no injected simulator fault changes the verdict"
    known = "Injected simulator fault that changes the verdict"
    simulation = made_up("full", evidence="simulated", metrics={"speed": 2.0})
    for mutations, weakness, strength in (
        ({"a-claim": {"x": list[str]()}}, blind, f" Weak: {blind}."),
        ({"a-claim": {"x": ["no bubble"]}}, "", f" {known}: no bubble."),
        ({}, "", ""),
    ):
        monkeypatch.setattr("repro.claims.judge.load_mutations", lambda found=mutations: found)
        result = judged(tmp_path, row(simulated=SPEED), simulation)
        (found,) = result.rows
        assert (found.weakness, describe_strength(found)) == (weakness, f"Margin -12 +12 %.{strength}")
        assert f"1 agree ({bool(weakness):d} weak)" in totals([result])
        assert row_result(tmp_path, 2.0).weakness == ""
