"""Tests of closed forms with sums calculated by hand, of origins of analytic values, and of independent quantities."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.claims import formulas as f
from repro.claims.expression import Uncertain, parse
from repro.claims.independence import QuantityCounts, analytic_origin, count_independent, is_constant
from repro.claims.ledger import CLOSED_FORM, COUNT, ITSELF
from tests.claims.constructed_records import RATIO, judged, record, row, value


@given(st.integers(1, 10**12), st.integers(1, 4096), st.sampled_from([0, 1, 2, 3]))
def test_model_states_do_not_grow_with_the_zero_stage(psi: int, nd: int, stage: int) -> None:
    here = f.model_state_bytes(psi, nd, stage)
    assert f.model_state_bytes(psi, 1, stage) == 16 * psi
    assert here <= f.model_state_bytes(psi, nd, max(stage - 1, 0))
    assert f.model_state_bytes(psi, nd, 0) / here == pytest.approx(f.memory_reduction(nd, stage))
    assert f.model_state_bytes(f.max_params(32e9, nd, stage), nd, stage) == pytest.approx(32e9)


def test_layer_activations_of_the_1t_model() -> None:
    """arXiv 2205.05198, eq. 1, 2 and 4, and two with selective recomputation; 5 a s / h = 64."""
    sbh = 2048 * 25600
    assert f.layer_activation_bytes(1, 2048, 25600, 160) == sbh * (34 + 64)
    assert f.layer_activation_bytes(1, 2048, 25600, 160, 8) == sbh * (10 + 3 + 8)
    assert f.layer_activation_bytes(1, 2048, 25600, 160, 8, sp=1) == sbh * (34 + 64) / 8
    assert f.layer_activation_bytes(1, 2048, 25600, 160, 8, selective=1) == sbh * (10 + 3)
    assert f.layer_activation_bytes(1, 2048, 25600, 160, 8, sp=1, selective=1) == sbh * 34 / 8


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("model_state_bytes", (1, 1, 4), "stage 4"),
        ("dp_elements", (1, 1, "ring"), "variant"),
        ("sqrt", (-0.25,), "no real root"),
        ("schedule_bubble", (2, 5, 2), "a multiple of stages = 2"),
        ("schedule_bubble", (2, 2.5, 1), "must be integers"),
        ("schedule_bubble", (0, 1, 1), "at least 1"),
    ],
)
def test_impossible_argument_is_an_error(name: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ArithmeticError, match=message):
        f.FORMULAS[name](*arguments)


def test_communication_volume_by_kind_of_parallelism() -> None:
    assert [f.dp_elements(10, stage) for stage in (0, 1, 2, 3)] == [20, 20, 20, 30]
    assert f.dp_elements(10, 1, "all-reduce") == 30
    assert f.megatron_block_elements(1024, 8192) == 12 * 1024 * 8192
    assert f.tensor_parallel_elements(2, 3, 5, 8) == pytest.approx(8 * 2 * 3 * 5 * 7 / 8)
    assert f.pipeline_elements(2, 3, 8, scatter=4) == 2 * 3 * 8 / 4
    # 4 stages have 3 boundaries, as do 2 stages with 2 chunks. Each micro-batch crosses them forward and backward.
    assert [f.pipeline_messages(*sizes) for sizes in ((4, 8), (2, 4, 2), (1, 8))] == [2 * 3 * 8, 2 * 3 * 4, 0]


def test_limits_times_steps_and_roots() -> None:
    """MEG2 sec. 5.1: 300B tokens with 175B parameters take 34 days on 1024 GPUs at 140 TFLOP/s."""
    assert [f.memory_reduction(f.inf, stage) for stage in (0, 1, 2)] == [1, 4, 8]
    assert f.memory_reduction(64, 3) == 64
    assert round(f.train_seconds(300e9, 175e9, 1024, 140e12) / f.DAY) == 34
    assert f.training_steps(3 * 5 * 7, 3, 5) == 7
    assert [f.FORMULAS["sqrt"](x) for x in (0.0, 0.25)] == [0.0, 0.5]


def test_gpt_params_is_the_sum_of_its_matrices() -> None:
    """Two layers of width 4, a vocabulary of 10 and 6 positions; eq. 2 has no final layer norm."""
    h = 4
    attention = 3 * (h * h + h) + h * h + h
    mlp = h * 4 * h + 4 * h + 4 * h * h + h
    layers = 2 * (attention + mlp + 2 * 2 * h)
    assert f.gpt_params(2, h, 10, 6) == pytest.approx(layers + 10 * h + 6 * h)
    padded = layers + 51200 * h + 1024 * h
    assert f.gpt_params(2, h) == pytest.approx(padded, abs=0.5), "the padded vocabulary of GPT-2"


def test_gpt_flops_is_the_sum_of_matrix_products() -> None:
    """Forward FLOPs per token: 24 h^2 + 4 s h in each layer (weights, attention) and 2 h V for the logits."""
    layers, h, s, vocab, batch = 3, 8, 5, 16, 2
    layer = batch * s * (24 * h * h + 4 * s * h)
    logits = batch * s * 2 * h * vocab
    assert f.gpt_flops(batch, s, layers, h, vocab) == pytest.approx(4 * layers * layer + 3 * logits)
    once = f.gpt_flops(batch, s, layers, h, vocab, recompute=0)
    assert once == pytest.approx(3 * layers * layer + 3 * logits)


def test_bubble_over_computation_of_pipelines() -> None:
    """With four stages and eight micro-batches, each stage computes in 8 slots and waits in 3.

    MEG2 sec. 2.2: (p-1)/m, and (p-1)/(v m) with interleaving.
    """
    assert f.bubble_fraction(4, 8) == f.schedule_bubble(4, 8) == 3 / 8
    assert f.bubble_fraction(4, 8, 2) == f.schedule_bubble(4, 8, 2) == 3 / 16
    assert f.schedule_bubble(8, 64, 4) == f.bubble_fraction(8, 64, 4) == 7 / 256
    assert f.schedule_bubble(2, 13) == pytest.approx(1 / 13)


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
        ("dp_elements(2e18)", False),  # adding 1 does not change this float
        ("dp_elements(huge)", False),
        ("12 * layers * hidden ** 2", False),
        ("printed('39') / 130", False),
        ("changed_lines('lora')", False),
    ],
)
def test_constant_is_an_expression_that_no_number_changes(text: str, constant: bool) -> None:
    """A constant analytic value cannot contradict the source, so it is no evidence."""
    assert is_constant(parse(text), {**COLUMNS, "zero": 1, "two": 2, "huge": 2e18}) == constant


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
