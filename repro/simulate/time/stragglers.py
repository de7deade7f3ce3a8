"""How long the slowest of many devices takes, which a synchronous step waits for.

Devices of one kind do not compute alike: chips, heat, power and hosts differ.  Take the seconds of a step's kernels on
the devices of a run for independent draws of a normal distribution.  A layer waits for its tensor-parallel group, a
micro-batch for its pipeline and an update for all replicas, so the step runs at the pace of the slowest device of all,
whose mean is that of the largest of N draws (H. A. David, H. N. Nagaraja, Order Statistics, 3rd ed., sec. 4.5):
1 + spread * E[max], with E[max] = 1.42 of 8 devices, 3.25 of 1,024 and 3.97 of 16,384.

What varies from one moment to the next, and not from device to device, is waited for at each collective: what disturbs
a device is independent of what disturbed it before, so variances add up, and of kernels that take s seconds it is
`jitter_s` * s.  The last of a group of n comes sqrt(jitter_s * s) * E[max of n] after their mean.
"""

from __future__ import annotations

from functools import cache
from math import erfc, expm1, log1p, sqrt

REACH, STEPS = 10.0, 4000
"""Of the integral: standard deviations from the middle, and parts."""


def slowest(spread: float, devices: int) -> float:
    """Seconds of the slowest of `devices` over their mean.  `spread`: standard deviation over the mean."""
    return 1.0 + spread * expected_maximum(devices) if spread else 1.0


def last(jitter_s: float, seconds: float, members: int) -> float:
    """Seconds by which the last of `members` is later than their mean, `seconds` after they were together."""
    return (jitter_s * seconds) ** 0.5 * expected_maximum(members)


@cache
def expected_maximum(draws: int) -> float:
    """The mean of the largest of `draws` of a standard normal distribution.

    The integral of 1 - F(x)^n - F(-x)^n over x > 0, by the trapezoid rule, which is exact to rounding for such a curve.
    """
    step = REACH / STEPS
    inner = sum(_beyond(i * step, draws) for i in range(1, STEPS))
    return step * (_beyond(0.0, draws) / 2 + inner)


def _beyond(x: float, draws: int) -> float:
    above = erfc(x / sqrt(2)) / 2
    return -expm1(draws * log1p(-above)) - (above**draws if draws > 1 else above)
