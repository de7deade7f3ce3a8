"""Tests of ledger expressions: arithmetic, rejected syntax, error messages, and intervals of uncertain inputs."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.claims.expression import ExpressionError, Uncertain, check_expression, evaluate_expression, parse
from repro.claims.formulas import FORMULAS


def value(text: str, **variables: float) -> object:
    return evaluate_expression(parse(text), FORMULAS, variables).value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("-(2 ** 3) / 4", -2.0),
        ("(1 - 4) * 2", -6),
        ("mean(1, 2, 6)", 3),
        ("model_state_bytes(10, nd=2, stage=3)", 80),
        ("16 * 123456789012345678", 16 * 123456789012345678),  # products of integers are exact
    ],
)
def test_arithmetic(text: str, expected: float) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('true')", "().__class__", "mean.__globals__", "[x for x in (1, 2)]"),
        *("lambda: 1", "x[0]", "{'a': 1}", "f'{1}'", "1 if 2 else 3", "1 < 2", "not 1", "1 and 2", "~1"),
        *("1 % 2", "1 // 2", "1 @ 2", "1 << 60", "True", "None", "b'x'", "1j", "...", "(y := 3)"),
        *("mean(*(1, 2))", "mean(**{'a': 1})", "mean(*x)", "mean(**x)", "import os", "x = 1", "1;2"),
        *("", "1 +"),
        "(" * 300 + "1" + ")" * 300,
        "1 + " * 1000 + "1",
    ],
)
def test_only_arithmetic_is_accepted(text: str) -> None:
    with pytest.raises(ExpressionError) as error:
        parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "unknown function")
            for text in ("open('x')", "eval('1')", "print(1)", "getattr(1, 'real')")
        ),
        ("max_param(1)", "did you mean max_params"),
        ("12 * hiden", "unknown name hiden"),
        ("model_state_bytes(1, stge=2)", "stge"),
        ("train_seconds(1, 2)", "missing"),
    ],
)
def test_names_and_arguments_are_checked_before_evaluation(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        check_expression(parse(text), FORMULAS, frozenset({"hidden"}))


@pytest.mark.parametrize("text", ["1 / 0", "10.0 ** 64 ** 1.5 ** 9", "2 ** 65", "(-1) ** 0.5", "'a' * 2.0"])
def test_arithmetic_error_is_one_line(text: str) -> None:
    with pytest.raises(ExpressionError) as error:
        value(text)
    assert "\n" not in str(error.value)


def test_uncertain_inputs_give_an_interval() -> None:
    inputs = {"a": Uncertain(10, 9, 11), "b": Uncertain(2, 1, 4), "c": 1}
    result = evaluate_expression(parse("a / b - c"), FORMULAS, inputs)
    assert (result.low, result.value, result.high) == (9 / 4 - 1, 4, 11 / 1 - 1)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=12), st.floats(0, 0.5))
def test_mean_of_digitised_points_has_error_of_one_point(points: list[float], error: float) -> None:
    names = {f"p{i}": Uncertain(point, point - error, point + error) for i, point in enumerate(points)}
    result = evaluate_expression(parse(f"mean({', '.join(names)})"), FORMULAS, names)
    middle = sum(points) / len(points)
    assert math.isclose(result.low, middle - error, abs_tol=1e-9)  # type: ignore[arg-type]
    assert math.isclose(result.high, middle + error, abs_tol=1e-9)  # type: ignore[arg-type]


SUMS = st.recursive(
    st.integers(1, 9).map(str),
    lambda part: st.builds("({} {} {})".format, part, st.sampled_from("+-*/"), part),
    max_leaves=8,
)


@given(SUMS)
def test_arithmetic_has_the_value_of_python(text: str) -> None:
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(ExpressionError):
            value(text)
    else:
        assert value(text) == expected


@given(st.text(max_size=60))
def test_text_is_rejected_or_contains_its_names(text: str) -> None:
    try:
        found = parse(text)
    except ExpressionError as error:
        message = str(error)
        assert "\n" not in message
    else:
        same = unicodedata.normalize("NFKC", text)  # Python normalizes identifiers to NFKC
        assert all(name in same for name in (*found.names, *found.calls))
