"""Tests of the origin of analytic values, of constant values, and of the count of independent quantities."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.claims.expression import Uncertain, parse
from repro.claims.independence import QuantityCounts, analytic_origin, count_independent, is_constant
from repro.claims.ledger import CLOSED_FORM, COUNT, ITSELF
from tests.claims.constructed_records import RATIO, judged, record, row, value

COLUMNS = {"layers": 72, "hidden": 3072, "mp": 16, "batch": 8, "gpus": 400, "tf": Uncertain(38, 37.5, 38.5)}


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("gpt_params(layers, hidden)", CLOSED_FORM),
        ("model_state_bytes(7.5e9, 16, 3)", CLOSED_FORM),
        ("batch * gpus / mp", ITSELF),  # columns of the source's table
        ("rounded(hidden, 100)", ITSELF),  # not a formula of a paper
        ("gpt_flops(1, 1024, layers, hidden) / printed('46.20')", ITSELF),
        ("gpt_flops(1, 1024, layers, hidden) * tf", ITSELF),  # a printed, rounded column
        ("changed_lines('lora')", COUNT),
        ("changed_lines('lora') * mp", ITSELF),
    ],
)
def test_origin_is_closed_form_for_formulas_without_printed_numbers(text: str, origin: str) -> None:
    assert analytic_origin(parse(text), COLUMNS) == origin


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("dp_elements(1, zero) / dp_elements(1, 0)", True),  # 2 Psi over 2 Psi
        ("dp_elements(7.5e9, zero) / dp_elements(7.5e9, 0)", True),
        ("megatron_all_reduces()", True),
        ("pipeline_elements(1, 1, 1)", True),
        ("flat_buffer_bytes(3) / 3", True),
        ("1 + 1", True),
        ("dp_elements(1, 3) / dp_elements(1, 0)", False),  # another stage has another volume
        ("memory_reduction(inf, two)", False),
        ("flat_buffer_bytes(3)", False),
        ("12 * layers * hidden ** 2", False),
        ("printed('39') / 130", False),
        ("changed_lines('lora')", False),
    ],
)
def test_constant_is_an_expression_that_no_number_changes(text: str, constant: bool) -> None:
    """A constant analytic value cannot contradict the source, so it is no evidence."""
    assert is_constant(parse(text), {**COLUMNS, "zero": 1, "two": 2}) == constant


def test_closed_forms_are_counted_as_consistency_not_as_tests(tmp_path: Path) -> None:
    """Two of three closed forms hold; none of the three is a test of the kind `analytic`."""
    formulas = '"dp_elements(1.5)"', '"dp_elements(3) / 2"', '"dp_elements(2.5)"'
    found = count_independent(
        [judged(tmp_path, "".join(row("3", text[1:-1], analytic=text) for text in formulas))]
    )
    assert (found["analytic"], found[ITSELF]) == (QuantityCounts(0, 0), QuantityCounts(tested=3, hold=2))


def test_ratio_of_two_tested_rates_adds_no_quantity(tmp_path: Path) -> None:
    runs = [
        record(name, **{"hardware_flops_per_s.device": rate * 1e12, "samples_per_s": rate})
        for name, rate in (("a", 6), ("b", 2), ("c", 1))
    ]

    def line(label: str, expression: str, expected: int, more: str = "") -> str:
        keys = f'scale = "scaled twin", expect = "{expected}"{more}'
        return row("3", label, measured=value(expression, keys))

    rate = 'metric("s/{0}", "hardware_flops_per_s.device") / 1e12'
    rates = line("a", rate.format("a"), 6) + line("b", rate.format("b"), 2)
    ratio = line("a/b", RATIO, 3, ', metric = "ratio"')
    other = line("a/c", RATIO.replace("s/b", "s/c"), 6, ', metric = "ratio"')
    for rows, count in ((rates + ratio, 2), (ratio, 1), (rates + ratio + other, 3)):
        found = count_independent([judged(tmp_path, rows, *runs)])
        assert found["measured"] == QuantityCounts(count, count)
