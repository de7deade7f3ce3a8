"""Tests of the origin of analytic values, and of the detection of analytic values that are constant."""

from __future__ import annotations

import pytest

from repro.claims.expression import Uncertain, parse
from repro.claims.independence import analytic_origin, is_constant
from repro.claims.ledger import CLOSED_FORM, COUNT, ITSELF

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
