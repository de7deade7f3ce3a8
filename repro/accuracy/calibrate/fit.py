"""Operator rates from measurements: seconds = fixed + bytes * per_byte + flops * per_flop with non-negative terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from repro.config.timing import UNALIGNED_MATMUL, OperatorRate

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
MATMUL, ELEMENTWISE = "matmul", "elementwise"
MIN_SIZE_RATIO = 8.0
"""Minimum ratio of the largest to the smallest call, in bytes, from which an operator gets a slope of its own."""
MIN_SIZES = 3
"""Minimum number of different sizes for a slope of its own."""
MAX_COMMON_RATE_ERROR = 0.1
"""Maximum median relative error at which the common rate stands for an operator."""


class TimedCall(NamedTuple):
    """One measured call of an operator."""

    nbytes: float
    """Bytes read and written, in the unit of a trace."""
    flops: float
    seconds: float


def fit_rate(points: Sequence[TimedCall]) -> OperatorRate:
    """Return the rate with the least sum of squared relative errors.

    The method is non-negative least squares (Lawson and Hanson 1974). Relative errors give a call of a microsecond the
    weight of a call of a second.
    """
    import numpy as np
    from scipy.optimize import nnls

    assert points
    assert all(point.seconds > 0 for point in points)
    columns = np.array([[1.0, point.nbytes, point.flops] for point in points])
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    seconds = np.array([point.seconds for point in points])
    solution, _ = nnls(columns / scale / seconds[:, None], np.ones(len(points)))
    fixed, per_byte, per_flop = (solution / scale).tolist()
    return OperatorRate(fixed_s=fixed, per_byte_s=per_byte, per_flop_s=per_flop)


def relative_errors(rate: OperatorRate, points: Sequence[TimedCall]) -> list[float]:
    """Return predicted / measured - 1 at every point."""
    return [rate.seconds(flops=point.flops, nbytes=point.nbytes) / point.seconds - 1 for point in points]


def median_error(rate: OperatorRate, points: Sequence[TimedCall]) -> float:
    """Return the median of the absolute relative errors."""
    return median(map(abs, relative_errors(rate, points)))


def operator_rates(points: Mapping[str, Sequence[TimedCall]]) -> dict[str, OperatorRate]:
    """Return the common rates and a rate for each operator that differs from them.

    The common rates are `matmul`, `elementwise`, and `unaligned_matmul` if there are such points.
    """
    pools: dict[str, list[TimedCall]] = {MATMUL: [], ELEMENTWISE: [], UNALIGNED_MATMUL: []}
    pools[UNALIGNED_MATMUL] += points.get(UNALIGNED_MATMUL, [])
    for name, found in points.items():
        if name in PRODUCTS:
            pools[MATMUL] += found
        elif name.startswith("aten."):
            pools[ELEMENTWISE] += [point for point in found if not point.flops]
    common = {name: fit_rate(found) for name, found in pools.items() if found}
    own = {}
    for name, found in sorted(points.items()):
        if name == UNALIGNED_MATMUL:
            continue
        shared = common.get(MATMUL if name in PRODUCTS else ELEMENTWISE)
        if shared is None:
            own[name] = fit_rate(found)
        elif median_error(shared, found) > MAX_COMMON_RATE_ERROR:
            own[name] = fit_rate(found) if has_size_range(found) else scale_rate(shared, found)
    return common | own


def scale_rate(common: OperatorRate, points: Sequence[TimedCall]) -> OperatorRate:
    """Return the common rate with the slopes, or the fixed seconds, scaled to the points: whichever dominates them."""
    work = [common.seconds(flops=point.flops, nbytes=point.nbytes) - common.fixed_s for point in points]
    if median(work) < common.fixed_s:
        calls = [point.seconds - seconds for point, seconds in zip(points, work, strict=True)]
        return replace(common, fixed_s=max(0.0, median(calls)))
    times = [
        (point.seconds - common.fixed_s) / seconds
        for point, seconds in zip(points, work, strict=True)
        if seconds and seconds >= common.fixed_s  # the fixed seconds dominate small calls
    ]
    factor = max(0.0, median(times))
    return replace(common, per_byte_s=factor * common.per_byte_s, per_flop_s=factor * common.per_flop_s)


def rate_of(known: Mapping[str, OperatorRate], name: str) -> OperatorRate:
    """Return the rate of an operator: its own, or else the common rate."""
    return known.get(name) or known[MATMUL if name in PRODUCTS else ELEMENTWISE]


def has_size_range(points: Sequence[TimedCall]) -> bool:
    """Return whether the sizes of the calls differ enough for a slope."""
    sizes = [max(1.0, point.nbytes) for point in points]
    return len(set(sizes)) >= MIN_SIZES and max(sizes) / min(sizes) >= MIN_SIZE_RATIO


def quantity(value: float | None, source: str) -> dict[str, Any]:
    """Return a number and its source as a table of a system file; None becomes `unknown`."""
    return {"value": "unknown" if value is None else round_digits(value), "source": source}


def round_digits(value: float) -> float:
    """Round a measurement to five significant digits; integers stay exact."""
    return value if isinstance(value, int) else float(f"{value:.5g}")
