"""Where evidence gets its inputs, as its expression says it."""

from __future__ import annotations

import pytest

from repro.claims.expression import Uncertain, parse
from repro.claims.independence import analytic_origin
from repro.claims.ledger import CLOSED_FORM, COUNT, ITSELF

COLUMNS = {"layers": 72, "hidden": 3072, "mp": 16, "batch": 8, "gpus": 400, "tf": Uncertain(38, 37.5, 38.5)}
RATES = frozenset({38e12})


@pytest.mark.parametrize(
    ("text", "published", "unit", "origin"),
    [
        ("gpt_params(layers, hidden)", 8e9, "parameters", CLOSED_FORM),
        ("model_state_bytes(7.5e9, 16, 3)", 7.5e9, "GB", CLOSED_FORM),  # 7.5e9 parameters are no 7.5 GB
        ("megatron_all_reduces()", 4.0, "calls", CLOSED_FORM),
        ("batch * gpus / mp", 200.0, "samples", ITSELF),  # columns of the source's own table
        ("hidden / 32", 96.0, "elements", ITSELF),
        ("rounded(hidden, 100)", 3100.0, "", ITSELF),  # no formula of a paper
        ("mean(tf, 40)", 39.0, "TFLOP/s", ITSELF),
        ("gpt_flops(1, 1024, layers, hidden) / printed('46.20')", 1.0, "TFLOP/s", ITSELF),
        ("gpt_flops(1, 1024, layers, hidden) * tf", 1.0, "TFLOP/s", ITSELF),  # a rounded column
        ("train_seconds(300e9, 175e9, 1024, 38e12)", 34.0, "days", ITSELF),  # a published rate
        ("checkpoint_elements(1, 1, 1, 1) / checkpoint_elements(1, 1, 1, 1, mp=16)", 16.0, "x", ITSELF),
        ("model_state_bytes(1, mp) * 0 + 24e9", 24e9, "GB", ITSELF),
        ("gpt_params(76, 16384, 53200, 2048)", 245.7e9, "parameters", ITSELF),  # nobody printed 53200
        ("gpt_params(76, 16384, vocab=53200)", 245.7e9, "parameters", ITSELF),
        ("gpt_params(76, 16384, 53248, 2048)", 245.7e9, "parameters", CLOSED_FORM),
        ("changed_lines('lora')", 11.0, "", COUNT),
        ("changed_lines('lora') * 0 + 11", 11.0, "", ITSELF),
        ("changed_lines('lora') * mp", 11.0, "", ITSELF),
    ],
)
def test_a_closed_form_takes_sizes_through_a_formula(
    text: str, published: float, unit: str, origin: str
) -> None:
    """Before, whatever had no `printed()` in it was a closed form."""
    assert analytic_origin(parse(text), COLUMNS, "confirmed", published, unit, RATES) == origin


def test_what_we_derived_is_no_test_of_the_formula() -> None:
    assert (
        analytic_origin(parse("gpt_params(layers, hidden)"), COLUMNS, "derived", 8e9, "parameters", RATES)
        == ITSELF
    )
