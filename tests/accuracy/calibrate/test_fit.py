"""Tests of fitted rates: known coefficients are recovered, and predicted times are not negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.accuracy.calibrate import fit
from repro.accuracy.calibrate.fit import TimedCall
from repro.config.timing import OperatorRate

SIZES = [(2.0**k, 2.0**j) for k in range(10, 26, 3) for j in range(12, 34, 5)]
TERM = st.floats(min_value=0.1, max_value=10.0)


def points_of(rate: OperatorRate, noise: list[float] | None = None) -> list[TimedCall]:
    factors = noise or [1.0] * len(SIZES)
    return [
        TimedCall(nbytes, flops, rate.seconds(flops=flops, nbytes=nbytes) * factor)
        for (nbytes, flops), factor in zip(SIZES, factors, strict=True)
    ]


@given(TERM, TERM, TERM)
def test_known_coefficients_are_recovered(fixed: float, per_byte: float, per_flop: float) -> None:
    rate = OperatorRate(fixed_s=fixed * 1e-5, per_byte_s=per_byte * 1e-10, per_flop_s=per_flop * 1e-11)
    found = fit.fit_rate(points_of(rate))
    assert found.fixed_s == pytest.approx(rate.fixed_s, rel=1e-4)
    assert found.per_byte_s == pytest.approx(rate.per_byte_s, rel=1e-4)
    assert found.per_flop_s == pytest.approx(rate.per_flop_s, rel=1e-4)


@given(st.lists(st.floats(min_value=0.9, max_value=1.1), min_size=len(SIZES), max_size=len(SIZES)))
def test_noisy_points_change_times_by_less_than_25_percent(noise: list[float]) -> None:
    rate = OperatorRate(fixed_s=1e-5, per_byte_s=1e-10, per_flop_s=1e-11)
    found = fit.fit_rate(points_of(rate, noise))
    assert max(abs(error) for error in fit.relative_errors(found, points_of(rate))) < 0.25


@given(st.lists(st.tuples(TERM, TERM, TERM), min_size=1, max_size=8))
def test_fitted_times_are_not_negative_and_increase(rows: list[tuple[float, float, float]]) -> None:
    found = fit.fit_rate([TimedCall(a * 1e6, b * 1e6, c * 1e-4) for a, b, c in rows])
    assert found.seconds(flops=0, nbytes=0) >= 0
    assert found.seconds(flops=1e9, nbytes=1e9) >= found.seconds(flops=1e8, nbytes=1e8)


def test_operators_have_separate_rates_only_if_they_differ() -> None:
    """Operators of equal speed share `elementwise`; slower operators and products have separate rates."""
    sizes = [2.0**k for k in range(12, 26, 2)]
    elementwise = {
        name: [TimedCall(n, 0, 5e-6 + n * 1e-10) for n in sizes]
        for name in ("aten.add", "aten.mul", "aten.sub")
    }
    slow = [TimedCall(n, n, 2e-4 + n * 1e-9) for n in sizes]
    product = [TimedCall(n, n**1.5, 1e-5 + n**1.5 * 1e-11) for n in sizes]
    tiny = [TimedCall(8, 0, 2e-5)]
    one_size = [TimedCall(2.0**22, 0, 5e-6 + 2.0**22 * 8e-10)]
    found = fit.operator_rates(
        {
            **elementwise,
            "repro.slow": slow,
            "aten.mm": product,
            "aten.bmm": product,
            "aten.sqrt": tiny,
            "aten.gelu": one_size,
        }
    )
    assert sorted(found) == ["aten.gelu", "aten.sqrt", "elementwise", "matmul", "repro.slow"]
    assert fit.rate_of(found, "aten.baddbmm") == found["matmul"]
    assert fit.rate_of(found, "repro.slow").fixed_s == pytest.approx(2e-4, rel=1e-3)
    gelu = fit.rate_of(found, "aten.gelu")
    assert gelu.fixed_s == found["elementwise"].fixed_s
    assert gelu.per_byte_s == pytest.approx(8e-10, rel=0.02), "eight times as slow as elementwise"
    sqrt = fit.rate_of(found, "aten.sqrt")
    assert sqrt.fixed_s == pytest.approx(2e-5, rel=0.01)
    assert sqrt.per_byte_s == found["elementwise"].per_byte_s, "eight bytes do not determine the rate"


def test_few_bytes_do_not_determine_the_byte_rate() -> None:
    """A median over a call on a number and a call on a mask would be thousands of times too large."""
    common = OperatorRate(fixed_s=1e-5, per_byte_s=4e-10)
    number, mask = TimedCall(8, 0, 3e-5), TimedCall(120_000, 0, 3 * 4.8e-5 + 1e-5)
    found = fit.scale_rate(common, [number, mask])
    assert found.seconds(flops=0, nbytes=mask.nbytes) == pytest.approx(mask.seconds)
    assert found.seconds(flops=0, nbytes=number.nbytes) == pytest.approx(common.fixed_s, rel=1e-3)
