"""Tests of summaries and ratio intervals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.measure.statistics import quantile, ratio_interval, summarize

POSITIVE = st.floats(min_value=1e-3, max_value=1e3)


def test_summary_is_median_and_20_80_quantiles() -> None:
    assert summarize([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 1.8, 4.2)
    assert summarize([0.25]) == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="values: empty"):
        summarize([])


@given(st.lists(POSITIVE, min_size=1, max_size=20), st.floats(0, 1))
def test_quantile_equals_numpys(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)))


def interval(pairs: list[tuple[float, float]], seed: int = 0) -> tuple[float, float, float]:
    """Return the ratio and its interval, which must exist."""
    ratio, low, high = ratio_interval(pairs, seed)
    assert low is not None
    assert high is not None
    return ratio, low, high


def test_drift_common_to_a_round_cancels_and_results_repeat_exactly() -> None:
    speeds, jitters = (10, 40, 20, 80, 30), (1, 1.01, 0.99, 1.0, 1.02)
    pairs = [(speed, 2 * speed * jitter) for speed, jitter in zip(speeds, jitters, strict=True)]
    ratio, low, high = interval(pairs, seed=7)
    assert ratio == pytest.approx(2.0)
    assert 1.98 - 1e-9 <= low < ratio < high <= 2.04 + 1e-9
    assert ratio_interval(pairs, seed=7) == (ratio, low, high)


def test_coverage_of_the_true_median_ratio() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(40):
        pairs = [(1.0, float(np.exp(x))) for x in rng.normal(0.2, 0.1, 15)]
        _, low, high = interval(pairs, seed=trial)
        hits += low <= np.exp(0.2) <= high
    assert hits >= 34


def test_degenerate_rounds_have_the_percentile_interval_or_none() -> None:
    assert ratio_interval([(2.0, 3.0)]) == (1.5, None, None)
    assert ratio_interval([(2.0, 3.0), (2.0, 5.0)]) == (2.0, None, None)
    assert ratio_interval([(2.0, 3.0)] * 6) == (1.5, 1.5, 1.5)
    # Omitting any one of these rounds does not change the median, so the acceleration of BCa is undefined.
    ratio, low, high = interval([*[(1.0, 1.0)] * 6, (1.0, 2.0)])
    assert (ratio, low) == (1.0, 1.0)
    assert np.isfinite(high)


@settings(max_examples=25)
@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=9))
def test_intervals_are_finite_and_ordered(pairs: list[tuple[float, float]]) -> None:
    ratio, low, high = ratio_interval(pairs)
    json.dumps([ratio, low, high], allow_nan=False)
    if low is not None and high is not None:
        ratios = [b / a for a, b in pairs]
        assert min(ratios) - 1e-9 <= low <= high <= max(ratios) + 1e-9


def test_invalid_rounds_are_refused() -> None:
    for pairs in ([], [(1.0,)], [(0.0, 1.0)], [(1.0, float("nan"))], [(1.0, -2.0)]):
        with pytest.raises(ValueError, match="round"):
            ratio_interval(pairs)  # type: ignore[arg-type]
