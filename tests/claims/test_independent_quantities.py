"""Tests of the count of independent quantities, and of the sentence that explains a verdict."""

from __future__ import annotations

from pathlib import Path

from repro.claims.independence import QuantityCounts, count_independent
from repro.claims.judge import judge
from repro.claims.ledger import ITSELF
from repro.claims.reader import load_ledger
from repro.claims.table import why
from repro.results.schema import Record
from tests import committed
from tests.claims.constructed_records import record
from tests.claims.test_judge import HEAD

RATE = '{ value = \'metric("s/%s", "hardware_flops_per_s.device") / 1e12\', scale = "scaled twin", expect = "%s" }'
RATIO = (
    '{ value = \'metric("s/%s", "samples_per_s") / metric("s/%s", "samples_per_s")\', scale = "scaled twin", '
    'expect = "%s", metric = "ratio" }'
)


def count_quantities(tmp_path: Path, *rows: str, of: list[Record]) -> dict[str, QuantityCounts]:
    lines = [f'{{ label = "{n}", published = "3", {row} }},\n' for n, row in enumerate(rows)]
    (tmp_path / "test.toml").write_text(HEAD + "".join(lines) + "]\n")
    return count_independent(judge(load_ledger(tmp_path), of))


def test_closed_forms_are_counted_as_consistency_not_as_tests(tmp_path: Path) -> None:
    """Two of three closed forms hold; none of the three is a test of the kind `analytic`."""
    formulas = [
        f'analytic = "{text}"' for text in ("dp_elements(1.5)", "dp_elements(3) / 2", "dp_elements(2.5)")
    ]
    found = count_quantities(tmp_path, *formulas, of=[])
    assert found["analytic"] == QuantityCounts(0, 0)
    assert found[ITSELF] == QuantityCounts(tested=3, hold=2)


def test_ratio_of_two_tested_rates_adds_no_quantity(tmp_path: Path) -> None:
    runs: list[Record] = [
        record(name, **{"hardware_flops_per_s.device": rate * 1e12, "samples_per_s": rate})
        for name, rate in (("a", 6), ("b", 2), ("c", 1))
    ]
    rates = [f"measured = {RATE % (name, rate)}" for name, rate in (("a", 6), ("b", 2))]
    ratio = f"measured = {RATIO % ('a', 'b', 3)}"
    other = f"measured = {RATIO % ('a', 'c', 6)}"
    assert count_quantities(tmp_path, *rates, ratio, of=runs)["measured"] == QuantityCounts(2, 2)
    assert count_quantities(tmp_path, ratio, of=runs)["measured"] == QuantityCounts(1, 1)
    assert count_quantities(tmp_path, *rates, ratio, other, of=runs)["measured"] == QuantityCounts(3, 3)


def test_every_verdict_has_an_explanation_in_one_line(tmp_path: Path) -> None:
    count_quantities(tmp_path, 'analytic = "dp_elements(1.5)"', of=[])
    (result,) = judge(load_ledger(tmp_path), [])
    assert why(result).startswith("The only value agrees with the formula of the source. ")
    for judged in judge(committed.ledger(), []):
        assert why(judged).endswith(".")
        assert "\n" not in why(judged)
