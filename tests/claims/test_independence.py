"""Where evidence gets its inputs, and whether a closed form could have another value."""

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
        ("batch * gpus / mp", ITSELF),  # columns of the source's own table
        ("rounded(hidden, 100)", ITSELF),  # no formula of a paper
        ("gpt_flops(1, 1024, layers, hidden) / printed('46.20')", ITSELF),
        ("gpt_flops(1, 1024, layers, hidden) * tf", ITSELF),  # a rounded column
        ("changed_lines('lora')", COUNT),
        ("changed_lines('lora') * mp", ITSELF),
    ],
)
def test_a_closed_form_takes_numbers_through_a_formula(text: str, origin: str) -> None:
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
def test_a_constant_over_a_constant_could_not_fail(text: str, constant: bool) -> None:
    """Before, six of thirteen reproduced claims of an empty store rested on such values."""
    assert is_constant(parse(text), {**COLUMNS, "zero": 1, "two": 2}) == constant
