"""Tests of the accepted values: printed digits, digitisation errors, tolerances by metric class, and bounds."""

from __future__ import annotations

from decimal import ROUND_DOWN, Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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
    """A printed number in an expression is uncertain by half of its last digit."""
    number, found = parse_printed_number(text), printed(text)
    assert (number.low, number.high, number.step) == pytest.approx((low, high, step))
    ends = (low - step / 2, (low + high) / 2, high + step / 2)
    assert (found.low, found.value, found.high) == pytest.approx(ends, rel=1e-12)


def test_units_are_multiples_of_bytes_seconds_and_flop() -> None:
    assert [UNITS[unit] for unit in ("MB", "GB", "TB")] == [1000**2, 1000**3, 1000**4]
    assert [UNITS[unit] for unit in ("MiB", "GiB")] == [1024**2, 1024**3]
    assert [UNITS[unit] for unit in ("GB/s", "TB/s")] == [UNITS["GB"], UNITS["TB"]]
    assert [UNITS[unit] for unit in ("TFLOP/s", "PFLOP/s", "EFLOP")] == [1000**4, 1000**5, 1000**6]
    assert 1000 * UNITS["ms"] == UNITS["s"] == UNITS["min"] / 60 == UNITS["h"] / 60**2
    assert UNITS["days"] == 24 * UNITS["h"] == UNITS["years"] / 365
    assert UNITS["PFLOP/s-days"] == UNITS["PFLOP/s"] * UNITS["days"]


def test_digitised_number_is_uncertain_by_its_error() -> None:
    found = digitised(10.0, 0.25)
    assert (found.low, found.value, found.high) == (9.75, 10.0, 10.25)


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


def test_published_measurement_is_rounded_and_not_truncated() -> None:
    """Exact values and scores have no tolerance."""
    for published, metric, inside, outside in (
        ("4", "exact", 4, 4.4),
        ("63.24", "quality", 63.244, 63.246),
        ("2", "ratio", 1.6, 2.9),
    ):
        assert agrees(published, inside, metric, closed_form=False)
        assert not agrees(published, outside, metric, closed_form=False)
    assert agrees("2", 2.4, "ratio", closed_form=False)
    assert not agrees("200", 230, "ratio", closed_form=False)


@pytest.mark.parametrize(
    ("metric", "percent"), [("memory", 5), ("throughput", 15), ("time", 15), ("ratio", 12)]
)
def test_measured_value_agrees_within_its_class_tolerance(metric: str, percent: int) -> None:
    for sign in (-1, 1):
        inside, outside = 1000 * (1 + sign * (percent - 0.2) / 100), 1000 * (1 + sign * (percent + 0.2) / 100)
        assert agrees("1000", inside, metric, closed_form=False)
        assert not agrees("1000", outside, metric, closed_form=False)
        assert not agrees("1000", inside, metric, closed_form=True), "a closed form has no tolerance"


@pytest.mark.parametrize(
    ("published", "limit", "agree"),
    [
        ("1.3B", 1.4e9, False),  # "fails beyond 1.3B", and 1.4B fits
        ("1.3B", 1.39e9, True),
        ("1.3B", 1.3e9, True),
        ("1.3B", 1.16e9, False),  # the source ran 1.16B
        ("1B", 1.4e9, False),
        ("1B", 0.6e9, False),  # half of the last digit of 1B is 0.5B
        ("6B", 8e9, False),
        ("6B", 7.9e9, True),
        ("13B", 13.4e9, True),  # the source tried no larger size
        ("13B", 13.6e9, False),
    ],
)
def test_limit_lies_between_the_sizes_that_the_source_tried(
    published: str, limit: float, agree: bool
) -> None:
    """The published limit "fails beyond 1.3B" is wrong for a system on which 1.4B fits."""
    steps = (1e9, 1.16e9, 1.3e9, 1.4e9, 1.5e9, 4e9, 6e9, 8e9, 13e9)
    assert agrees(published, limit, "limit", closed_form=False, steps=steps) == agree


@pytest.mark.parametrize(
    ("published", "value", "agree"),
    [
        ("8", 8.72, False),
        ("0", 0.6, False),
        ("4187", 4187.9, True),
        ("200", 200.9, True),
        ("3-5", 2.92, True),
        ("3-5", 5.78, False),  # the ends of a range are rounded and not truncated
    ],
)
def test_closed_form_is_truncated_to_at_least_three_digits(published: str, value: float, agree: bool) -> None:
    assert agrees(published, value, "memory") == agree


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


def test_digitisation_error_widens_the_accepted_values() -> None:
    for value, how, agree in (
        (10.19, {}, True),
        (10.17, {}, False),
        (10.19, {"bound": "over", "metric": "throughput", "closed_form": False}, True),
        (10.17, {"bound": "over", "metric": "throughput", "closed_form": False}, False),
    ):
        assert agrees("10.23", value, error=0.05, **how) == agree


def test_up_to_requires_a_value_near_the_bound() -> None:
    """For example, 4B does not agree with "up to 6B", although 4B is below the bound."""
    steps = {"steps": (4e9, 6e9, 8e9, 13e9), "bound": "up to"}
    for closed_form in (True, False):
        for value, near in (
            (4e9, False),
            (5.6e9, closed_form),
            (5.8e9, True),
            (6e9, True),
            (7.9e9, not closed_form),
            (8e9, False),
        ):
            assert agrees("6B", value, "limit", closed_form=closed_form, **steps) == near
    assert agrees("14B", 14.42e9, "limit", steps=(14e9, 20e9), bound="up to")
    for value, near in ((9.4, False), (9.5, True), (11.1, True), (11.3, False), (16.0, False)):
        assert agrees("10", value, "ratio", closed_form=False, bound="up to", count=True) == near
    assert [agrees("4", value, bound="up to", count=True) for value in (3.9, 4.0, 4.1)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("closed_form", [True, False])
def test_counts_must_be_equal(closed_form: bool) -> None:
    """A count is neither rounded nor truncated: 2.9 Psi is not 2 Psi, and 4.99 all-reduces are not 4."""
    for number, others in (("4", (3.5, 3.99, 4.01, 4.99)), ("2", (1.5, 2.4, 2.9)), ("1.5", (1.45, 1.55))):
        assert agrees(number, float(number), closed_form=closed_form, count=True)
        assert not any(agrees(number, other, closed_form=closed_form, count=True) for other in others)


def test_interval_agrees_if_it_overlaps_the_accepted_values() -> None:
    rule = accepted_range(parse_printed_number("40"), "exact", closed_form=True, bound="over")
    assert rule.meets(38.7, 40.2)
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
    assert agrees("7.7", 10.7, "share", closed_form=False)
    assert not agrees("7.7", 10.8, "share", closed_form=False)
    assert not agrees("7.7", 8.0, "share")
    described = [describe_class_tolerance(metric) for metric in ("share", "exact", "ratio")]
    assert described == ["within 3 points", "exactly", "within 0.12 relative"]


def test_tolerance_at_scale_is_relative_to_the_larger_end() -> None:
    """A tolerance of 12 % of 10, the larger absolute bound, extends the range from -10 to 1 by 1.2 at each end."""
    for sign, ends in ((1, (-10, 1)), (-1, (-1, 10))):
        assert agrees_at_scale(sign * 2.19, ends, "ratio")
        assert not agrees_at_scale(sign * 2.21, ends, "ratio")
