"""Timer of single operators, with warm-up, flushed caches before each repeat, and all ranks measuring at once.

On a GPU, large matrix products run before each repeat, so that operators are measured at the clock rate of training.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from repro.kernels.clock import DeviceClock
from repro.measure.provenance import nvml
from repro.measure.statistics import quantile
from repro.parallel.comm import Group
from repro.util.processes import usable_cores

ASSUMED_CACHE = 64 * 2**20
"""Last-level cache size, in bytes, that is assumed if the device reports none."""
REPEAT_S = 2e-3
"""Minimum duration of a repeated measurement, in seconds: far above the resolution of the clock."""
CROWDED_S = 40e-3
"""Minimum duration of a measurement if ranks share cores, in seconds; long enough that most ranks measure at once."""
MOST_CALLS = 64
LOAD_SIZE = 4096
"""Number of rows and columns of the matrices whose products load a GPU before measurements."""
HOLD_S = 5e-3
"""Minimum duration of the matrix products that load a GPU before a measurement, in seconds."""
WARM_S = 20e-3
"""Duration of a GPU load, in seconds, after which the GPU's clock rate is compared with its settled clock rate."""
SAMPLE_S = 0.1
"""Duration of the GPU load between two samples of the clock rate, in seconds."""
MIN_SETTLE_S, MAX_SETTLE_S = 1.0, 6.0
"""Minimum and maximum duration of the first GPU load, in seconds, in which the clock rate settles."""
MAX_REWARM_S = 1.0
"""Maximum duration of a later GPU load, which returns the GPU to the settled clock rate, in seconds."""
MAX_LOAD_S = 15.0
"""Maximum total duration of all GPU loads of a calibration, in seconds; after it, no load runs."""
RECORD_INTERVAL_S = 0.1
"""Minimum time between two records of a GPU's clock rate and power, in seconds."""
SETTLED_SAMPLES = 4
"""Number of latest clock-rate samples whose mean is compared with the mean of as many preceding samples."""
MAX_CLOCK_DRIFT = 0.01
"""Maximum relative difference of two consecutive means of a GPU's clock rate at which the rate counts as settled."""
MAX_CLOCK_DIFFERENCE = 0.05
"""Maximum relative difference of a GPU's clock rate from its settled rate at which no further GPU load is necessary."""


def gpu_state(device: torch.device) -> dict[str, float]:
    """Return clock rate (`sm_mhz`) and power (`power_w`) of a GPU; empty if NVML does not report them."""
    with nvml() as n:
        if n is None:
            return {}
        try:
            clock_mhz, power_mw = torch.cuda.clock_rate(device), torch.cuda.power_draw(device)
            return {"sm_mhz": float(clock_mhz), "power_w": power_mw / 1e3}
        except (n.NVMLError, RuntimeError, ImportError):
            return {}


class SustainedLoad:
    """Matrix products that bring a GPU to the clock rate and power of training, and a record of both."""

    def __init__(
        self,
        product: Callable[[], Any],
        synchronize: Callable[[], Any],
        state: Callable[[], dict[str, float]],
    ):
        """Measure the duration of the matrix product `product`; `state` returns the GPU's clock rate and power."""
        self._product, self._synchronize, self._state = product, synchronize, state
        self._settled_mhz: float | None = None
        """Settled clock rate of the GPU, in MHz; 0: NVML reports none; None: before the first load."""
        self._loaded_s = self._next_record_s = 0.0
        self._states: list[dict[str, float]] = []
        for count in (1, 20):  # the first product initialises the BLAS library, so its duration is discarded
            synchronize()
            began = time.perf_counter()
            for _ in range(count):
                product()
            synchronize()
            self._product_s = (time.perf_counter() - began) / count

    def hold(self, seconds: float) -> None:
        """Queue matrix products on the GPU that take at least `seconds`, and at least 5 ms (`HOLD_S`)."""
        for _ in range(math.ceil(max(seconds, HOLD_S) / self._product_s)):
            self._product()

    def settle(self) -> None:
        """Run matrix products until the GPU's clock rate has settled or, in later calls, is back at the settled rate.

        Without NVML, the first call runs matrix products for `MIN_SETTLE_S`, and later calls do nothing.
        """
        began = time.perf_counter()
        if self._settled_mhz is None:
            samples: list[float] = []
            while True:
                samples.append(self._sample(SAMPLE_S))
                spent = time.perf_counter() - began
                if spent >= MIN_SETTLE_S and (_has_settled(samples) or spent >= MAX_SETTLE_S):
                    break
            self._settled_mhz = fmean(samples[-SETTLED_SAMPLES:])
        elif self._settled_mhz and self._loaded_s < MAX_LOAD_S:
            now = self._sample(WARM_S)
            while abs(now / self._settled_mhz - 1) > MAX_CLOCK_DIFFERENCE:
                if time.perf_counter() - began >= MAX_REWARM_S:
                    self._settled_mhz = now or self._settled_mhz  # a warmer GPU has a lower clock rate
                    break
                now = self._sample(SAMPLE_S)
        self._loaded_s += time.perf_counter() - began

    def record(self) -> None:
        """Record clock rate and power of the busy GPU, at most once in `RECORD_INTERVAL_S`."""
        now = time.perf_counter()
        if now >= self._next_record_s and (found := self._state()):
            self._states.append(found)
            self._next_record_s = now + RECORD_INTERVAL_S

    def medians(self) -> dict[str, float]:
        """Return the medians of the GPU's recorded clock rates and powers; empty without NVML."""
        return {key: median(state[key] for state in self._states) for key in (self._states or [{}])[0]}

    def _sample(self, seconds: float) -> float:
        """Return the GPU's clock rate, in MHz, after matrix products of `seconds`; 0 if NVML reports none."""
        self.hold(seconds)
        found = self._state().get("sm_mhz", 0.0)
        self._synchronize()
        return found


def _has_settled(clocks: Sequence[float]) -> bool:
    """Return whether the means of a clock rate's latest and preceding samples agree; true without NVML."""
    if not all(clocks):
        return True
    if len(clocks) < 2 * SETTLED_SAMPLES:
        return False
    before, last = clocks[-2 * SETTLED_SAMPLES : -SETTLED_SAMPLES], clocks[-SETTLED_SAMPLES:]
    return abs(fmean(last) / fmean(before) - 1) <= MAX_CLOCK_DRIFT


def gpu_load(device: torch.device) -> SustainedLoad:
    """Return the load of a GPU: half-precision matrix products of normally distributed numbers."""
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    a, b = (torch.randn(LOAD_SIZE, LOAD_SIZE, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    synchronize = partial(torch.cuda.synchronize, device)
    return SustainedLoad(lambda: torch.mm(a, b, out=out), synchronize, partial(gpu_state, device))


class OperatorTiming(NamedTuple):
    """Seconds of one call of an operator: median, quartiles and number of repeated measurements."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        """Return the spread of the measurements: half of the interquartile range, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def timing(seconds: Sequence[float]) -> OperatorTiming:
    """Return the median and quartiles of repeated measurements, in seconds."""
    middle, low, high = (quantile(seconds, part) for part in (0.5, 0.25, 0.75))
    return OperatorTiming(middle, low, high, len(seconds))


class OperatorClock:
    """Timer of operator calls on one device, while the other ranks of the group time equal calls."""

    def __init__(
        self, device: torch.device, group: Group, repeats: int, neighbours: int = 1, cores: int | None = None
    ):
        """Divide a node's last-level cache and `cores` (default: all usable) among the `neighbours` ranks on it."""
        self.device, self.group, self.repeats = device, group, repeats
        neighbours = neighbours if device.type == "cpu" else 1
        self.ranks_per_core = max(1.0, neighbours / (cores or usable_cores()))
        self.cache = max(1, cache_bytes(device) // neighbours)
        """Part of the last-level cache that this rank flushes, in bytes; the ranks of a node flush it together."""
        self._wipe = torch.empty(self.cache + self.cache // 4, dtype=torch.uint8, device=device)
        self.load = gpu_load(device) if device.type == "cuda" else None
        """Matrix products that load a GPU before measurements; None on processors."""
        self._device_clock = DeviceClock(flush=self.flush, hold=self.load.hold) if self.load else None

    def flush(self) -> None:
        """Overwrite this rank's part of the last-level cache, so that operators read their operands from memory."""
        self._wipe.zero_()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, make: Callable[[], Callable[[], object]], nbytes: int) -> OperatorTiming:
        """Return the duration of one call of the function that `make` returns, which reads and writes `nbytes`.

        The calls rotate through sets of arguments and results that together exceed the cache. The operands of an
        operator in a training step are not in the cache either.
        """
        first = make()
        for _ in range(2):
            first()
        once = self._run([first], 1)
        sets = min(MOST_CALLS, 1 + self.cache // max(1, nbytes))
        calls = max(sets, min(MOST_CALLS, math.ceil(REPEAT_S / max(once, 1e-7))))
        results: deque[object] = deque(maxlen=sets)

        def keeping(function: Callable[[], object]) -> Callable[[], object]:
            return lambda: results.append(function())

        functions = [keeping(function) for function in (first, *(make() for _ in range(sets - 1)))]
        if self.load:
            self.load.settle()  # the GPU was idle, and its clock rate dropped, while the operands were prepared
        self._run(functions, sets)
        in_turn: Callable[[int], object] = lambda i: functions[i % sets]()
        found = []
        for _ in range(self.repeats):
            self.flush()
            self.synchronize()
            self.group.barrier()
            found.append(self.in_a_crowd(in_turn, lambda: self._run(functions, calls)))
        return timing(found)

    def in_a_crowd(self, call: Callable[[int], object], alone: Callable[[], float]) -> float:
        """Return the seconds per call of the operator `call`, measured by `alone` if each rank has its own core.

        On shared cores, the processor time of calls for 40 ms (`CROWDED_S`) is multiplied by the ranks per core. Wall
        time would be too short, since ranks leave a barrier at different times, so that some have the core alone.
        """
        if self.ranks_per_core == 1:
            return alone()
        end, began, count = time.perf_counter() + CROWDED_S, time.thread_time(), 0
        while not count or time.perf_counter() < end:
            call(count)
            count += 1
        return (time.thread_time() - began) / count * self.ranks_per_core

    def _run(self, functions: Sequence[Callable[[], object]], calls: int) -> float:
        """Return the mean duration of `calls` calls, in seconds, which rotate through `functions`."""
        if self.load is None or self._device_clock is None:
            began = time.perf_counter()
            for i in range(calls):
                functions[i % len(functions)]()
            return (time.perf_counter() - began) / calls
        rotated = [functions[i % len(functions)] for i in range(calls)]
        return self._device_clock.queued_seconds(rotated, self.load.record) / calls


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's last-level cache, in bytes."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or ASSUMED_CACHE
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) or ASSUMED_CACHE
