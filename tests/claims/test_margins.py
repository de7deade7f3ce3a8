"""Tests of margins: the change of a value that changes its verdict, and tests that are weak."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest

from repro.claims.headlines import describe_margin, describe_strength
from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.claims.table import totals
from repro.claims.tolerance import AcceptedRange
from repro.claims.verdicts import NOT_REPRODUCED, REPRODUCED, RowResult
from tests.claims.constructed_records import record
from tests.claims.test_judge import HEAD
from tests.records import made_up


def row_result(tmp_path: Path, row: str, value: float, evidence: str = "", steps: str = "") -> RowResult:
    """Return the result of a row with the TOML keys `row` for a measured `value`."""
    evidence = evidence or 'value = \'metric("s/full", "speed")\''
    head = HEAD.replace("rows = [", f"{steps}rows = [")
    (tmp_path / "test.toml").write_text(f'{head}{{ label = "x", {row}, measured = {{ {evidence} }} }},\n]\n')
    (result,) = judge(load_ledger(tmp_path), [record("full", speed=value)])
    return result.rows[0]


@pytest.mark.parametrize(
    ("row", "value", "margin", "is_weak", "shown"),
    [
        # 12 % on both sides of 2.0; the value is 0.1 above 2.0.
        ('published = "2.0"', 2.1, ((2.1 - 1.76) / 2, (2.24 - 2.1) / 2), False, "-17 +7"),
        # 15 % on both sides: a value at one end may change by 30 % towards the other end.
        ('published = "2.0", metric = "time", unit = "s"', 1.71, (0.005, 0.295), True, "-0.5 +29.5"),
        # A bound has one end; the value may be far from the bound.
        ('published = "2", bound = "over"', 3.0, (0.5, inf), True, "-50"),
        ('published = "2", bound = "under"', 1.6, (inf, 0.2), False, "+20"),
        # An exact value has no tolerance.
        ('published = "2", metric = "exact"', 2.0, (0.0, 0.0), False, "0"),
        # A margin relative to the published number 0 is infinite.
        ('published = "0", metric = "share", unit = "%"', 0.01, (inf, inf), True, "–"),
    ],
)
def test_margin_by_kind_of_statement(
    tmp_path: Path, row: str, value: float, margin: Sequence[float], is_weak: bool, shown: str
) -> None:
    found = row_result(tmp_path, row, value)
    assert found.verdict == REPRODUCED
    assert found.margin == pytest.approx(margin)
    assert (bool(found.weakness), describe_margin(found)) == (is_weak, shown)


def test_margin_of_a_limit_ends_at_the_next_size(tmp_path: Path) -> None:
    """Accepted limits are 12.5B, half a digit below 13B, to 20B, the next size that the source tried."""
    row = 'published = "13B", unit = "parameters", metric = "limit"'
    found = row_result(tmp_path, row, 13e9, steps='steps = ["13B", "20B"]\n')
    assert found.margin == pytest.approx((0.5 / 13, 7 / 13))
    assert describe_strength(found) == (
        "Margin -3.85 +53.8 %. Weak: the verdict tolerates a change of the value by more than 25%."
    )


def test_margin_of_scaled_twin_is_relative_to_the_formula(tmp_path: Path) -> None:
    twin = 'value = \'metric("s/full", "speed")\', expect = "3", scale = "scaled twin", metric = "parity"'
    found = row_result(tmp_path, 'published = "2.0"', 3.0, twin)
    assert found.margin == pytest.approx((1e-5, 1e-5))


def test_row_that_is_not_reproduced_has_no_margin(tmp_path: Path) -> None:
    found = row_result(tmp_path, 'published = "2.0"', 2.3)
    assert (found.verdict, found.margin, found.weakness) == (NOT_REPRODUCED, None, "")


@pytest.mark.parametrize("value", [8.0, 9.3, 11.4])
@pytest.mark.parametrize("bound", ["", "over", "at least", "under", "at most", "up to"])
def test_verdict_changes_just_beyond_the_margin(tmp_path: Path, bound: str, value: float) -> None:
    """A change 1e-6 smaller than the margin keeps the verdict; a change 1e-6 larger than the margin changes it."""
    row = f'published = "10", bound = "{bound}", unit = "s", metric = "time"'
    found = row_result(tmp_path, row, value)
    if found.margin is None:
        assert found.verdict == NOT_REPRODUCED
        return
    for end, side in zip(found.margin, (-1, 1), strict=True):
        changed = [value + side * 10 * (end + more) for more in (-1e-6, 1e-6)] if end < inf else [1000 * side]
        verdicts = [row_result(tmp_path, row, one).verdict for one in changed]
        assert verdicts == ([REPRODUCED, NOT_REPRODUCED] if end < inf else [REPRODUCED])


def test_margin_of_an_interval_extends_to_its_far_end() -> None:
    accepted = AcceptedRange(10, 20, False, False, "")
    assert accepted.margin(9, 12, 10) == pytest.approx((0.2, 1.1))


@pytest.mark.parametrize(
    ("mutations", "weakness", "strength"),
    [
        (
            {"a-claim": {"x": []}},
            "no simulator fault changes the verdict",
            "Margin -12 +12 %. Weak: no simulator fault changes the verdict.",
        ),
        (
            {"a-claim": {"x": ["no bubble"]}},
            "",
            "Margin -12 +12 %. Simulator fault that would change the verdict: no bubble.",
        ),
        ({}, "", "Margin -12 +12 %."),
    ],
)
def test_simulated_value_that_no_mutation_changes_is_weak(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutations: dict[str, dict[str, list[str]]],
    weakness: str,
    strength: str,
) -> None:
    monkeypatch.setattr("repro.claims.judge.load_mutations", lambda: mutations)
    keys = 'published = "2.0", simulated = { value = \'metric("s/full", "speed")\' }'
    (tmp_path / "test.toml").write_text(f'{HEAD}{{ label = "x", {keys} }},\n]\n')
    store = [made_up("full", evidence="simulated", metrics={"speed": 2.0})]
    (result,) = judge(load_ledger(tmp_path), store)
    assert (result.rows[0].weakness, describe_strength(result.rows[0])) == (weakness, strength)
    assert f"1 agree ({bool(weakness):d} weak)" in totals([result])


def test_measured_value_needs_no_mutation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.claims.judge.load_mutations", lambda: {"a-claim": {"x": []}})
    assert row_result(tmp_path, 'published = "2.0"', 2.0).weakness == ""
