"""Seconds of an operator from its shapes: a roofline with tiles and waves for matrix products, else memory traffic.

A synchronous step runs at the pace of the slowest of N devices, whose kernel times are normally distributed (H. A.
David, H. N. Nagaraja, Order Statistics, 3rd ed., sec. 4.5). Seconds may be arrays of "lanes": one entry per sampled
case of the uncertain inputs, so that one schedule times a step in all cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache, reduce
from math import ceil, erfc, expm1, log1p, prod, sqrt
from typing import Any, NamedTuple, cast

import numpy as np

from repro.config.system import System
from repro.config.timing import EXCHANGE, MESSAGE, UNALIGNED_MATMUL
from repro.simulate.trace.events import HOST_COPY, HOST_VIEWS, HOST_WAIT, Operator


def maximum(first: float, other: float) -> float:
    """Return the larger of two numbers, elementwise for arrays."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        return cast(float, np.maximum(first, other))
    return other if other > first else first


def maximum_of(several: Iterable[float]) -> float:
    """Return the largest of several numbers, elementwise for arrays."""
    return reduce(maximum, several)


def minimum(first: float, other: float) -> float:
    """Return the smaller of two numbers, elementwise for arrays."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        return cast(float, np.minimum(first, other))
    return min(first, other)


def nonzero_or(number: float | None, other: float) -> float:
    """Return `number`, or `other` if `number` is 0 or None, elementwise for arrays."""
    if isinstance(number, np.ndarray):
        return cast(float, np.where(number, number, other))
    return number or other


def in_any_lane(condition: Any) -> bool:
    """Return whether `condition` is true; for an array, whether any element is true."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)


def first_lane(number: float) -> float:
    """Return `number`, or the first element of an array over sampled cases: the case with the best input values."""
    return float(number.flat[0] if isinstance(number, np.ndarray) else number)


INTEGRAL_REACH, INTEGRAL_STEPS = 10.0, 4000
"""Upper limit, in standard deviations, and number of intervals of the integral in `expected_maximum`."""


def slowest_device_factor(spread: float, devices: int) -> float:
    """Return the ratio of expected maximum to mean of `devices` device times. `spread`: relative standard deviation."""
    return 1.0 + spread * expected_maximum(devices) if in_any_lane(spread) else 1.0


def last_arrival_delay(jitter_s: float, seconds: float, members: int) -> float:
    """Return the mean delay in seconds of the last of `members` ranks behind their mean, after `seconds` of kernels.

    `jitter_s`: variance of a rank's time, in seconds squared per second of kernels.
    """
    return (jitter_s * seconds) ** 0.5 * expected_maximum(members)


@cache
def expected_maximum(draws: int) -> float:
    """Return the expected maximum of n = `draws` draws from the standard normal distribution F.

    It is the integral of 1 - F(x)^n - F(-x)^n over x > 0, for which the trapezoid rule is exact to rounding.
    """
    step = INTEGRAL_REACH / INTEGRAL_STEPS
    inner = sum(_integrand(i * step, draws) for i in range(1, INTEGRAL_STEPS))
    return step * (_integrand(0.0, draws) / 2 + inner)


def _integrand(x: float, draws: int) -> float:
    above = erfc(x / sqrt(2)) / 2
    return -expm1(draws * log1p(-above)) - (above**draws if draws > 1 else above)


MATMULS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
ATTENTION = "aten._scaled_dot_product_"
BIASED_ATTENTION = "aten._scaled_dot_product_efficient_"
"""Prefix of attention operators that read a bias as large as the scores, which contains the causal mask."""
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the tile of a matrix product's thread block, as in half-precision cuBLAS and CUTLASS."""
TILE_READS = 16.0
"""Cost of reading operands from shared memory: m x n tiles reach 1 / (1 + 16 (1/m + 1/n)) of the peak rate."""
PROLOGUE = 64
"""Overhead of a matrix-product tile (first loads, result store), as additional elements of the inner dimension."""
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which a matrix product may split its inner dimension, so that more thread blocks compute."""
ATTENTION_EFFICIENCY = 0.7
"""Rate of fused attention over that of large matrix products, if not measured (2205.14135 sec. 4, 2307.08691)."""
STREAMED = frozenset(
    (
        "aten.add_",
        "aten.copy_",
        "aten.zero_",
        "aten._to_copy",
        "aten._foreach_mul_",
        "aten._foreach_copy_",
        "repro.norm_squared",
        "repro.adamw_",
    )
)
"""Names of operators that read and write parameters or gradients once. `Kernels.passes` scales the time of all calls,
including calls on activations such as the in-place addition of a bias."""
ALIGNMENT = 8
"""Alignment for tensor cores: number of half-precision elements (16 bytes) that divides all matrix product sizes."""


class Kernels(NamedTuple):
    """Efficiency of the kernels of a software generation (see `repro.simulate.time.calibration`)."""

    products: float
    """Ratio of actual to modelled time of matrix products."""
    others: float
    """Ratio of actual to modelled time of all kernels except matrix products, attention, and passes over parameters."""
    passes: float = 1.0
    """Ratio of actual to modelled time of operators that read and write parameters or gradients once (`STREAMED`)."""
    operator_s: float = 0.0
    """Host time per operator of a layer in seconds; 0 selects the system's host time per operator."""
    attention: float = 0.0
    """Rate of fused attention for infinitely many keys, in FLOP/s without masked scores. 0: the modelled time
    multiplied by `others` applies."""
    attention_start: float = 0.0
    """Number of keys with which fused attention reaches half of the rate `attention`."""


MODELLED_KERNELS = Kernels(1.0, 1.0)
"""Efficiency of kernels that take exactly the modelled time."""


class DeviceCost:
    """Time of operators on the slowest of all devices in a synchronous step, at one precision.

    Times are arrays over sampled cases of the uncertain inputs if numbers of the system or of the kernels are arrays.
    """

    def __init__(self, system: System, precision: str, kernels: Kernels = MODELLED_KERNELS, devices: int = 1):
        """`kernels`: efficiency of the software's kernels. `devices`: number of devices in the synchronous step.

        Raises `ConfigError` if the device's peak FLOP/s or memory bandwidth is unknown.
        """
        time = system.timing
        self.system, self.kernels, self.pace = system, kernels, time.pace
        self.slowest = slowest_device_factor(time.spread, devices)
        self.rates = system.device.operators
        self.launch_s = time.launch_s
        self.operator_s = nonzero_or(kernels.operator_s, self.launch_s)
        self.backward_s = nonzero_or(kernels.operator_s, nonzero_or(time.backward_launch_s, self.launch_s))
        self.message_s = self.rates[MESSAGE].fixed_s if MESSAGE in self.rates else 0.0
        self.exchange_s = self.rates[EXCHANGE].fixed_s if EXCHANGE in self.rates else 0.0
        self.jitter_s = time.jitter_s
        self.kernel_s, self.fill_s = time.kernel_s, time.fill_s
        self.bandwidth = self.peak = 0.0
        if not self.rates:
            known = system.device.memory_bandwidth.known("device.memory_bandwidth", system=system.name)
            self.bandwidth = known * time.memory_efficiency
            self.peak = system.peak(precision) * time.matmul_efficiency
        unthrottled = nonzero_or(time.unthrottled_efficiency, time.matmul_efficiency)
        self.unthrottled = self.peak * maximum(1.0, unthrottled / time.matmul_efficiency)
        self.unaligned = minimum(nonzero_or(time.unaligned_flops, 0.0), self.peak)
        self.units = time.multiprocessors
        slow = system.device.peak_flops.get("fp32")
        self.slow_peak = 0.0 if slow is None or slow.value is None else slow.value * time.matmul_efficiency
        self.host_bandwidth = 0.0
        if "pcie" in system.links and (bandwidth := system.links["pcie"].bandwidth.value) is not None:
            self.host_bandwidth = bandwidth * system.links["pcie"].used("pcie", "efficiency").known(
                "links.pcie.efficiency"
            )
        self.seconds = lru_cache(maxsize=None)(lambda operator: self._seconds(operator) * self.slowest)

    def _seconds(self, operator: Operator) -> float:
        """Return the seconds of `operator` on an average device."""
        if operator.name in (HOST_VIEWS, HOST_WAIT):
            return 0.0
        if self.rates:
            return self._calibrated(operator)
        name, factor = operator.name, self.kernels.others
        if name in MATMULS:
            if self._on_ordinary_cores(operator):
                # These products avoid tensor cores, and arithmetic limits them: one measured rate suits all software.
                return self._product(operator, self.unaligned) + self.kernel_s
            if operator.itemsize == 4 and in_any_lane(self.slow_peak):
                found = self._product(operator, self.slow_peak)
            else:
                found = maximum(self._product(operator, self.unthrottled), operator.flops / self.peak)
            factor = self.kernels.products
        elif name.startswith(ATTENTION):
            found = self._attention(operator)
            factor = 1.0 if in_any_lane(self.kernels.attention) else factor
        else:
            found = self._moved(operator) + self.fill_s * operator.calls
            factor = self.kernels.passes if name in STREAMED else factor
        return (found + self.kernel_s * operator.calls) * factor * self.pace

    def _calibrated(self, operator: Operator) -> float:
        kind = "matmul" if operator.name in MATMULS else "elementwise"
        rate = self.rates.get(operator.name) or self.rates[kind]
        if kind == "matmul" and UNALIGNED_MATMUL in self.rates and is_unaligned(operator):
            rate = self.rates[UNALIGNED_MATMUL]
        calls, work = operator.calls, float(operator.flops)
        if operator.name.startswith(ATTENTION):  # The measured FLOP/s include masked scores, half of all.
            work = 2 * work * causal_share(operator)
        return calls * rate.seconds(work / calls, (operator.read + operator.written) / calls)

    def _moved(self, operator: Operator) -> float:
        if operator.name == HOST_COPY and in_any_lane(self.host_bandwidth):
            return operator.written / self.host_bandwidth
        return bytes_moved(operator) / self.bandwidth

    def _attention(self, operator: Operator) -> float:
        """Return the seconds of fused attention: the maximum of memory time and arithmetic on unmasked scores."""
        rate = self.peak * ATTENTION_EFFICIENCY
        if in_any_lane(self.kernels.attention):
            rate = self.kernels.attention / (1 + self.kernels.attention_start / attention_keys(operator))
        part = 1.0 if operator.name.startswith(BIASED_ATTENTION) else causal_share(operator)
        return maximum(operator.flops * part / rate, self._moved(operator))

    def _on_ordinary_cores(self, operator: Operator) -> bool:
        """Return whether unaligned sizes exclude a half-precision product from the device's tensor cores."""
        return in_any_lane(self.unaligned) and is_unaligned(operator)

    def _product(self, operator: Operator, peak: float) -> float:
        batch, m, n, k = product_sizes(operator)
        if isinstance(self.units, np.ndarray):
            distinct, place = np.unique(self.units, return_inverse=True)
            works = np.array([split_flops(batch, m, n, k, units) for units in distinct.tolist()])[place].T
        else:
            works = split_flops(batch, m, n, k, self.units)
        summed = ((parts > 1) * (parts + 1) * 4 * batch * m * n for parts in SPLITS)
        times = (work / peak + moved / self.bandwidth for work, moved in zip(works, summed, strict=True))
        return maximum(reduce(minimum, times), self._moved(operator))


@lru_cache(maxsize=4096)
def split_flops(batch: int, m: int, n: int, k: int, units: float) -> list[float]:
    """Return the cost of a matrix product [m, k] x [k, n] with the best tile, for each number of parts in `SPLITS`.

    The cost is in FLOP at the rate of the largest tile, including idle multiprocessors. `units`: number of
    multiprocessors, each of which computes its tiles one after another.
    """
    return [
        min(
            ceil(batch * ceil(m / rows) * ceil(n / columns) * parts / units)
            * (ceil(k / parts) + PROLOGUE)
            * (2 * rows * columns * units)
            * (_shared_memory_cost(rows, columns) / _shared_memory_cost(*TILES[0]))
            for rows, columns in TILES
        )
        for parts in SPLITS
    ]


def bytes_moved(operator: Operator) -> int:
    """Return the bytes that an operator reads from and writes to device memory; an embedding reads only result rows."""
    return 2 * operator.written if operator.name == "aten.embedding" else operator.read + operator.written


def is_unaligned(operator: Operator) -> bool:
    """Return whether m, n or k of a half-precision product is no multiple of `ALIGNMENT`."""
    return operator.itemsize != 4 and any(size % ALIGNMENT for size in product_sizes(operator)[1:])


def _shared_memory_cost(rows: int, columns: int) -> float:
    return 1 + TILE_READS * (1 / rows + 1 / columns)


def causal_share(operator: Operator) -> float:
    """Return the share of attention scores that the causal mask leaves: 1/2, or more if keys outnumber queries."""
    lengths = _lengths(operator)
    return 1 - min(lengths) / max(lengths) / 2


def attention_keys(operator: Operator) -> int:
    """Return the number of keys per head of an attention operator."""
    return max(_lengths(operator))


def _lengths(operator: Operator) -> list[int]:
    return [shape[2] for shape in operator.shapes if len(shape) == 4]


def product_sizes(operator: Operator) -> tuple[int, int, int, int]:
    """Return (batch, m, n, k) of a matrix product from the shapes of its operands."""
    at = 1 if operator.name in ("aten.addmm", "aten.baddbmm") else 0
    left, right = operator.shapes[at], operator.shapes[at + 1]
    return prod(left[:-2]), left[-2], right[-1], left[-1]
