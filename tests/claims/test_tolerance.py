"""Tests of the accepted values: printed digits, digitisation errors, tolerances by metric class, and bounds."""

from __future__ import annotations

from decimal import ROUND_DOWN, Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from repro.claims.expression import Uncertain
from repro.claims.published import UNITS, digitised, format_value, parse_printed_number, printed
from repro.claims.tolerance import (
    RELATIVE_TOLERANCE,
    accepted_range,
    accepted_range_at_scale,
    describe_class_tolerance,
    statement_of,
)


def agrees(
    published: str, value: float, metric: str = "exact", closed_form: bool = True, **how: object
) -> bool:
    rule = accepted_range(parse_printed_number(published), metric, closed_form=closed_form, **how)  # type: ignore[arg-type]
    return rule.meets(value, value)


@pytest.mark.parametrize(
    ("text", "low", "high", "step"),
    [
        ("1.88", 1.88, 1.88, 0.01),
        ("1,640", 1640, 1640, 1),
        ("14.4B", 14.4e9, 14.4e9, 1e8),
        ("0.5T", 0.5e12, 0.5e12, 1e11),
        ("16-20B", 16e9, 20e9, 1e9),
        ("4.56-4.64", 4.56, 4.64, 0.01),
        ("6.0", 6, 6, 0.1),
    ],
)
def test_printed_number_has_a_range_and_a_last_digit(text: str, low: float, high: float, step: float) -> None:
    """A printed number in an expression is uncertain by half of its last digit, and a digitised one by its error."""
    number, found = parse_printed_number(text), printed(text)
    assert digitised(low, step) == Uncertain(low, low - step, low + step)
    assert (number.low, number.high, number.step) == pytest.approx((low, high, step))
    ends = (low - step / 2, (low + high) / 2, high + step / 2)
    assert (found.low, found.value, found.high) == pytest.approx(ends, rel=1e-12)


def test_units_are_multiples_of_bytes_seconds_and_flop() -> None:
    """`test_ledger.py` reads the other units."""
    assert [UNITS[unit] for unit in ("MB", "MiB", "TB/s")] == [1000**2, 1024**2, UNITS["TB"]]
    assert 1000 * UNITS["ms"] == UNITS["s"] == UNITS["min"] / 60 == UNITS["h"] / 60**2
    assert UNITS["days"] == 24 * UNITS["h"] == UNITS["years"] / 365


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [
        (0.0, None, "0"),
        (1.5e9, "14.4B", "1.5B"),
        (2.3456789, None, "2.346"),
        (-17.0, None, "-17"),
        (12345.6, None, "12,346"),
        (-12345.6, None, "-12,346"),
        (999_999_999_999_999.0, None, "999,999,999,999,999"),
        (1e15, None, "1e+15"),
        (-3e15, None, "-3e+15"),
        (float("inf"), "14.4B", "inf"),
    ],
)
def test_displayed_numbers_have_few_digits(value: float, like: str | None, text: str) -> None:
    assert format_value(value, parse_printed_number(like) if like else None) == text


@pytest.mark.parametrize("text", ["", "oom", "1.5e-4", "4 x", "1-2-3", "5-3", "1.2.3", "B"])
def test_text_without_a_number_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|not a number"):
        parse_printed_number(text)


@given(st.floats(0, 1e6), st.integers(0, 3))
def test_value_agrees_with_its_rounded_digits(value: float, digits: int) -> None:
    assert agrees(f"{value:.{digits}f}", value)


@given(st.floats(100, 1e6), st.integers(0, 3))
def test_value_agrees_with_its_truncated_digits(value: float, digits: int) -> None:
    truncated = Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_DOWN)
    assert agrees(f"{truncated:f}", value)


@given(st.integers(1, 10**6), st.integers(0, 3), st.floats(-100, 100))
def test_value_with_other_printed_digits_does_not_agree(number: int, digits: int, offset: float) -> None:
    """A value half a digit below or one digit above prints as another number, rounded or truncated."""
    assume(not -0.501 < offset < 1.001)
    step = 10.0**-digits
    assert not agrees(f"{number * step:.{digits}f}", (number + offset) * step)


TRIED = {"steps": (1e9, 1.16e9, 1.3e9, 1.4e9, 1.5e9, 4e9, 6e9, 8e9, 13e9)}
RUN, COUNT, UP_TO = {"closed_form": False}, {"count": True}, {"bound": "up to"}


@pytest.mark.parametrize(
    ("published", "metric", "how", "accepted", "rejected"),
    [
        # A measurement is rounded and not truncated. Exact values and scores have no tolerance.
        ("4", "exact", RUN, [4], [4.4]),
        ("63.24", "quality", RUN, [63.244], [63.246]),
        ("2", "ratio", RUN, [1.6, 2.4], [2.9]),
        ("200", "ratio", RUN, [], [230]),
        # A measurement has the tolerance of its class, and a closed form has none.
        ("1000", "memory", RUN, [952, 1048], [948, 1052]),
        ("1000", "throughput", RUN, [852, 1148], [848, 1152]),
        ("1000", "time", RUN, [852, 1148], [848, 1152]),
        ("1000", "ratio", RUN, [882, 1118], [878, 1122]),
        ("7.7", "share", RUN, [10.7], [10.8]),
        *(("1000", metric, {}, [], [952, 1048]) for metric in ("memory", "throughput", "time", "ratio")),
        ("7.7", "share", {}, [], [8.0]),
        # A limit lies between the sizes that the source tried: "fails beyond 1.3B" is wrong if 1.4B fits.
        ("1.3B", "limit", RUN | TRIED, [1.3e9, 1.39e9], [1.16e9, 1.4e9]),
        ("1B", "limit", RUN | TRIED, [], [0.6e9, 1.4e9]),  # half of the last digit of 1B is 0.5B
        ("6B", "limit", RUN | TRIED, [7.9e9], [8e9]),
        ("13B", "limit", RUN | TRIED, [13.4e9], [13.6e9]),  # the source tried no larger size
        # A closed form may be truncated to three digits or more. The ends of a range are rounded.
        ("8", "memory", {}, [], [8.72]),
        ("0", "memory", {}, [], [0.6]),
        ("4187", "memory", {}, [4187.9], []),
        ("200", "memory", {}, [200.9], []),
        ("3-5", "memory", {}, [2.92], [5.78]),
        # A digitisation error widens the accepted values.
        ("10.23", "exact", {"error": 0.05}, [10.19], [10.17]),
        ("10.23", "throughput", RUN | {"error": 0.05, "bound": "over"}, [10.19], [10.17]),
        ("1024", "exact", {"error": 0.7}, [1023.4, 1024.9], [1023.2, 1025.0]),  # 1025 prints as 1025
        # "Up to 6B" needs a value near the bound, so 4B does not agree.
        ("6B", "limit", TRIED | UP_TO, [5.6e9, 5.8e9, 6e9], [4e9, 7.9e9, 8e9]),
        ("6B", "limit", RUN | TRIED | UP_TO, [5.8e9, 6e9, 7.9e9], [4e9, 5.6e9, 8e9]),
        ("14B", "limit", {"steps": (14e9, 20e9)} | UP_TO, [14.42e9], []),
        ("10", "ratio", RUN | UP_TO | COUNT, [9.5, 11.1], [9.4, 11.3, 16.0]),
        ("4", "exact", UP_TO | COUNT, [4.0], [3.9, 4.1]),
        # A count is neither rounded nor truncated: 2.9 Psi is not 2 Psi, and 4.99 all-reduces are not 4.
        *(("4", "exact", COUNT | how, [4], [3.5, 3.99, 4.01, 4.99]) for how in ({}, RUN)),
        *(("2", "exact", COUNT | how, [2], [1.5, 2.4, 2.9]) for how in ({}, RUN)),
        *(("1.5", "exact", COUNT | how, [1.5], [1.45, 1.55]) for how in ({}, RUN)),
    ],
)
def test_accepted_values_by_class_of_metric_and_kind_of_evidence(
    published: str, metric: str, how: dict[str, object], accepted: list[float], rejected: list[float]
) -> None:
    for value in (*accepted, *rejected):
        assert agrees(published, value, metric, **how) == (value in accepted), value


@pytest.mark.parametrize(
    ("published", "bound", "metric", "calls", "kind"),
    [
        ("1.3B", "", "memory", "", "value"),
        ("equal loss", "", "parity", "metric", "value"),
        ("38", "over", "throughput", "metric", "bound"),
        ("C1 < C2", "", "throughput", "rising", "order"),
        ("rising", "", "exact", "rising", "order"),
        ("oom", "", "memory", "outcome", "event"),
        ("forward", "", "memory", "failure", "event"),
        ("1.3B", "", "limit", "largest_fit", "threshold"),
    ],
)
def test_kind_of_a_statement_follows_from_its_text(
    published: str, bound: str, metric: str, calls: str, kind: str
) -> None:
    number = parse_printed_number(published) if published[0].isdigit() else None
    assert statement_of(number, published, bound, metric, {calls}) == kind


@pytest.mark.parametrize("metric", sorted(RELATIVE_TOLERANCE))
@pytest.mark.parametrize("closed_form", [True, False])
def test_tolerance_does_not_widen_a_bound(metric: str, closed_form: bool) -> None:
    """For example, 37.99 does not agree with "over 38" in any class of metric."""
    for published, bound, inside, outside in (
        ("38", "over", 38.01, 38),
        ("2", "over", 2.001, 2),
        ("24", "at least", 24, 23.99),
        ("1.5B", "under", 1.49e9, 1.5e9),
        ("20", "at most", 20, 20.01),
    ):
        how = {"closed_form": closed_form, "bound": bound, "steps": (1e9, 1.5e9, 2.5e9)}
        assert agrees(published, inside, metric, **how)
        assert not agrees(published, outside, metric, **how)
    rule = accepted_range(parse_printed_number("40"), metric, closed_form=closed_form, bound="over")
    assert rule.meets(38.7, 40.2), "the interval overlaps the accepted values"
    assert not rule.meets(38.7, 39.3)


def agrees_at_scale(value: float, expected: float | tuple[float, float], metric: str) -> bool:
    ends = expected if isinstance(expected, tuple) else (expected, expected)
    return accepted_range_at_scale(ends, metric).meets(value, value)


@given(st.integers(1, 10**12), st.integers(2, 1024))
def test_error_of_one_byte_per_parameter_does_not_agree(psi: int, nd: int) -> None:
    """One byte per parameter is at least 1/16 of the model states, more than the tolerance for padding."""
    states = 16 * psi
    assert agrees_at_scale(states, states, "exact")
    assert not agrees_at_scale(states + psi, states, "exact-padding")
    assert not agrees_at_scale(states - psi, states, "exact-padding")
    assert not agrees_at_scale(4 * psi, 4 * psi + 12 * psi / nd, "exact-padding")


def test_share_has_a_tolerance_of_three_percentage_points() -> None:
    """Yuan 1.0 has 7.7 % of idle time. No bubble, half of the share and twice the share do not agree."""
    for expected in (100 / 13, 12.5, 25.0):
        for value in (expected - 2.9, expected + 2.9):
            assert agrees_at_scale(value, expected, "share")
        for value in (0.0, expected / 2, expected + 3.1, 2 * expected):
            assert not agrees_at_scale(value, expected, "share")
    described = [describe_class_tolerance(metric) for metric in ("share", "exact", "ratio")]
    assert described == ["within 3 points", "exactly", "within 0.12 relative"]


def test_tolerance_at_scale_is_relative_to_the_larger_end() -> None:
    """A tolerance of 12 % of 10, the larger absolute bound, extends the range from -10 to 1 by 1.2 at each end."""
    for sign, ends in ((1, (-10, 1)), (-1, (-1, 10))):
        assert agrees_at_scale(sign * 2.19, ends, "ratio")
        assert not agrees_at_scale(sign * 2.21, ends, "ratio")
