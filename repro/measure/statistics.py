"""Robust summaries of timings, and bootstrap confidence intervals for ratios of interleaved runs.

Strategies A and B run in rounds, A B A B ..., so that slow drift (clock, temperature, other jobs) cancels in the ratio
of a round.  The statistic is the median of these ratios, and its interval is a bias-corrected and accelerated (BCa)
bootstrap over rounds (Efron 1987).
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
"""Nominal coverage of the bootstrap confidence intervals, as a fraction."""
RESAMPLES = 9999
"""Number of bootstrap resamples. With 9999, the 2.5 % and 97.5 % quantiles need no interpolation."""
MINIMUM_ROUNDS = 3
"""Minimum number of rounds for a confidence interval; fewer rounds have too few different bootstrap resamples."""


class Summary(NamedTuple):
    """Median and 20 % / 80 % quantiles of a sample, in the unit of its values."""

    median: float
    p20: float
    p80: float


class RatioInterval(NamedTuple):
    """Median ratio of two strategies (subject/baseline) and its confidence interval, None with too few rounds."""

    ratio: float
    low: float | None
    high: float | None


def quantile(values: Sequence[float], q: float) -> float:
    """Return the `q` quantile (0..1) of `values` with linear interpolation (type 7, numpy's default)."""
    if not values:
        raise ValueError("values: empty. A quantile needs one value or more")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def summarize(seconds: Sequence[float]) -> Summary:
    """Return the median and the 20 % / 80 % quantiles of a sample.  Raises `ValueError` for an empty sample."""
    return Summary(quantile(seconds, 0.5), quantile(seconds, 0.2), quantile(seconds, 0.8))


def round_ratios(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Return the ratio subject/baseline of two strategies in every round; both values must be positive and finite."""
    if not pairs:
        raise ValueError("pairs: empty. A ratio needs one round or more")
    for pair in pairs:
        if len(pair) != 2 or not all(math.isfinite(value) and value > 0 for value in pair):
            raise ValueError(f"round {list(pair)!r}: must be (baseline, subject), both positive and finite")
    return [subject / baseline for baseline, subject in pairs]


def ratio_interval(pairs: Sequence[Sequence[float]], seed: int = 0) -> RatioInterval:
    """Return the median over rounds of subject/baseline and its 95 % BCa bootstrap interval.

    `pairs`: one `(baseline, subject)` per round, e.g. samples/s.  `seed` determines the resamples.  With fewer than
    three rounds, `low` and `high` are `None`.  If BCa is undefined (its jackknife or its bias term degenerates), the
    percentile bootstrap replaces it.  An interval inside the range of n ratios misses the true median with a
    probability of at least 2^(1-n).
    """
    ratios = round_ratios(pairs)
    median = statistics.median(ratios)
    if len(ratios) < MINIMUM_ROUNDS:
        return RatioInterval(median, None, None)
    if min(ratios) == max(ratios):
        return RatioInterval(median, ratios[0], ratios[0])
    low, high = _bootstrap(ratios, "BCa", seed)
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = _bootstrap(ratios, "percentile", seed)
    return RatioInterval(median, low, high)


def _bootstrap(ratios: list[float], method: str, seed: int) -> tuple[float, float]:
    import numpy as np
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns about degenerate samples, for which it returns nan.
        result = stats.bootstrap(
            (np.asarray(ratios),),
            np.median,
            confidence_level=CONFIDENCE,
            n_resamples=RESAMPLES,
            method=method,
            random_state=np.random.default_rng(seed),
        )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
