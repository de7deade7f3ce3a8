"""Rates from measurements: seconds = fixed + bytes * per_byte + flops * per_flop, none of them negative."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from repro.config.timing import OperatorRate
from repro.measure.statistics import quantile

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
MATMUL, ELEMENTWISE = "matmul", "elementwise"
SPAN = 8.0
"""An operator's calls say how its seconds grow with size if the largest moves this many times what the smallest does;
else they grow as the common rate does."""
CALLS = 3
CLOSE = 0.1
"""It needs no rate of its own if the common one is this close to its calls (median of the relative errors)."""


class Measurement(NamedTuple):
    """One measured call."""

    nbytes: float
    """Read and written, as a trace counts them."""
    flops: float
    seconds: float


def fit(points: Sequence[Measurement]) -> OperatorRate:
    """The rate with the least sum of squared *relative* errors: calls of a microsecond count like those of a second.

    Terms that the points do not need are 0 (non-negative least squares, Lawson and Hanson 1974).
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


def errors(rate: OperatorRate, points: Sequence[Measurement]) -> list[float]:
    """Relative error of the rate at every point, predicted / measured - 1."""
    return [rate.seconds(flops=point.flops, nbytes=point.nbytes) / point.seconds - 1 for point in points]


def median_error(rate: OperatorRate, points: Sequence[Measurement]) -> float:
    """Median of the absolute relative errors."""
    return quantile([abs(error) for error in errors(rate, points)], 0.5)


def rates(points: Mapping[str, Sequence[Measurement]]) -> dict[str, OperatorRate]:
    """Rates by operator: `matmul` and `elementwise` for all, and one of its own for each that differs."""
    pools: dict[str, list[Measurement]] = {MATMUL: [], ELEMENTWISE: []}
    for name, found in points.items():
        if name in PRODUCTS:
            pools[MATMUL] += found
        elif name.startswith("aten."):
            pools[ELEMENTWISE] += [point for point in found if not point.flops]
    common = {name: fit(found) for name, found in pools.items() if found}
    own = {}
    for name, found in sorted(points.items()):
        shared = common.get(MATMUL if name in PRODUCTS else ELEMENTWISE)
        fits_all = shared is not None and median_error(shared, found) <= CLOSE
        if not fits_all:
            own[name] = fit(found) if shared is None or spans(found) else scaled(shared, found)
    return common | own


def scaled(common: OperatorRate, points: Sequence[Measurement]) -> OperatorRate:
    """The common rate with another price of work, or of a call, whichever the points are mostly made of."""
    work = [common.seconds(flops=point.flops, nbytes=point.nbytes) - common.fixed_s for point in points]
    if quantile(work, 0.5) < common.fixed_s:
        calls = [point.seconds - seconds for point, seconds in zip(points, work, strict=True)]
        return replace(common, fixed_s=max(0.0, quantile(calls, 0.5)))
    times = [
        (point.seconds - common.fixed_s) / seconds
        for point, seconds in zip(points, work, strict=True)
        if seconds and seconds >= common.fixed_s  # a call of a few bytes says nothing of the price of a byte
    ]
    factor = max(0.0, quantile(times, 0.5))
    return replace(common, per_byte_s=factor * common.per_byte_s, per_flop_s=factor * common.per_flop_s)


def rate_of(known: Mapping[str, OperatorRate], name: str) -> OperatorRate:
    """The rate that counts for an operator: its own, or the common one."""
    return known.get(name) or known[MATMUL if name in PRODUCTS else ELEMENTWISE]


def spans(points: Sequence[Measurement]) -> bool:
    """Whether the points say how seconds grow with size."""
    sizes = [max(1.0, point.nbytes) for point in points]
    return len(set(sizes)) >= CALLS and math.log2(max(sizes) / min(sizes)) >= math.log2(SPAN)
