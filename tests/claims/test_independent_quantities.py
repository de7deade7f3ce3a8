"""Cells are not things: one formula in a hundred cells is one, and a ratio of two known rates is none."""

from __future__ import annotations

from pathlib import Path

from repro.claims.independence import QuantityCounts, count_independent
from repro.claims.judge import judge
from repro.claims.ledger import ITSELF
from repro.claims.reader import load_ledger
from repro.claims.table import summary, totals, why
from repro.results.schema import Record
from tests import committed
from tests.claims.made_up import record
from tests.claims.test_judge import HEAD

RATE = '{ value = \'metric("s/%s", "hardware_flops_per_s.device") / 1e12\', scale = "scaled twin", expect = "%s" }'
RATIO = (
    '{ value = \'metric("s/%s", "samples_per_s") / metric("s/%s", "samples_per_s")\', scale = "scaled twin", '
    'expect = "%s", metric = "ratio" }'
)


def things(tmp_path: Path, *rows: str, of: list[Record]) -> dict[str, QuantityCounts]:
    lines = [f'{{ label = "{n}", published = "3", {row} }},\n' for n, row in enumerate(rows)]
    (tmp_path / "test.toml").write_text(HEAD + "".join(lines) + "]\n")
    return count_independent(judge(load_ledger(tmp_path), of))


def test_one_formula_in_many_cells_is_one_thing(tmp_path: Path) -> None:
    cells = [
        f'analytic = "{text}"' for text in ("dp_elements(1.5)", "dp_elements(3) / 2", "dp_elements(6) / 4")
    ]
    found = things(tmp_path, *cells, 'analytic = "megatron_all_reduces() - 1.0"', of=[])
    assert found["analytic"] == QuantityCounts(tested=2, hold=2)
    states = ('analytic = "model_state_bytes(0.1875)"', 'analytic = "max_params(48)"')
    assert things(tmp_path, *states, of=[])["analytic"] == QuantityCounts(1, 1)


def test_a_thing_holds_in_all_its_cells(tmp_path: Path) -> None:
    cells = ('analytic = "dp_elements(1.5)"', 'analytic = "dp_elements(2.5)"')
    assert things(tmp_path, *cells, of=[])["analytic"] == QuantityCounts(tested=1, hold=0)


def test_rates_of_two_runs_and_their_ratio_are_two_things(tmp_path: Path) -> None:
    runs: list[Record] = [
        record(name, **{"hardware_flops_per_s.device": rate * 1e12, "samples_per_s": rate})
        for name, rate in (("a", 6), ("b", 2), ("c", 1))
    ]
    rates = [f"measured = {RATE % (name, rate)}" for name, rate in (("a", 6), ("b", 2))]
    ratio = f"measured = {RATIO % ('a', 'b', 3)}"
    other = f"measured = {RATIO % ('a', 'c', 6)}"
    assert things(tmp_path, *rates, ratio, of=runs)["measured"] == QuantityCounts(2, 2)
    assert things(tmp_path, ratio, of=runs)["measured"] == QuantityCounts(1, 1)
    assert things(tmp_path, *rates, ratio, other, of=runs)["measured"] == QuantityCounts(3, 3)


def test_what_is_consistent_is_counted_apart(tmp_path: Path) -> None:
    found = things(tmp_path, 'analytic = "3 / 1"', 'analytic = "dp_elements(1.5)"', of=[])
    assert (found[ITSELF], found["analytic"]) == (QuantityCounts(1, 1), QuantityCounts(1, 1))
    counts = summary(judge(load_ledger(tmp_path), []))
    assert (counts["things"], counts["evidence"]["analytic"]["rows"]) == (
        {"tested": 1, "hold": 1, "possible": 0},
        1,
    )
    assert "1 of 1 other values are consistent with their own source, which is no test" in totals(counts)


def test_the_ledgers_cells_are_far_more_than_its_things() -> None:
    """95 analytic values are one formula of model-state bytes; before, the totals counted cells."""
    counts = summary(judge(committed.ledger(), []))
    found = counts["evidence"]["analytic"]
    assert found["rows_decided"] > 5 * found["things"]


def test_every_verdict_is_said_in_one_sentence(tmp_path: Path) -> None:
    things(tmp_path, 'analytic = "dp_elements(1.5)"', of=[])
    (result,) = judge(load_ledger(tmp_path), [])
    expected = "The only value agrees (the formula of the source; 1 independent test)."
    assert why(result) == expected
    for judged in judge(committed.ledger(), []):
        assert why(judged).endswith(".")
        assert "\n" not in why(judged)
