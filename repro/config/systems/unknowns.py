"""Uncertain numbers of a system, which have a range, and the system with other values of them.

A case gives every unknown a quantile: 0 at the low end, 1/2 at the best value, 1 at the high end.  The quantiles of a
key are equal for every system and every run, so that two predictions can be compared case by case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from typing import Any, cast

from repro.config.links import KEYS
from repro.config.quantity import Quantity
from repro.config.system import System

PACE = "device.time.pace"
"""Key of the speed of a device relative to its kind, which scales its compute time."""
SPREAD = "device.time.spread"
"""Key of the spread of a run's devices, of which the slowest scales the compute time."""
PER_RANGE = 4
"""Number of search steps from one end of a range to the other."""
DRAWS = 64
"""Number of joint draws of all unknowns."""
COUNTED_KEYS = ("rings", "adapters", "switch", "pod", "multiprocessors", "devices_per_node", "nodes")
"""Last words of keys that are counts."""
FRACTION_KEYS = (
    *("efficiency", "matmul_efficiency", "unthrottled_efficiency", "memory_efficiency"),
    *("overlap_cost", "pair"),
)
"""Last words of keys whose maximum is 1."""
LOW, BEST, HIGH = 0.0, 0.5, 1.0
"""Quantiles of the low end of a range, the best value and the high end."""
REACH = 4.0
"""Factor of a search outside the range: quantile -1 is the low end divided by it, 2 the high end times it."""


@dataclass(frozen=True)
class QuantileCase:
    """Quantiles of all unknowns."""

    moved: str = ""
    """Key of the unknown that is not at its best value."""
    quantile: float = BEST
    """Quantile of the moved unknown."""
    number: int | None = None
    """Index of a joint draw, in which all unknowns are moved; None for a single move."""

    def quantile_of(self, key: str) -> float:
        """Return the quantile of `key`."""
        if self.number is not None:
            return _column(key)[self.number]
        return self.quantile if key == self.moved else BEST


JOINT = tuple(QuantileCase(number=number) for number in range(DRAWS))
"""Latin hypercube; a column depends on its key only."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A number with a range of possible values."""

    key: str
    """Key in the file, `links.inter-node.rings`."""
    low: float
    best: float
    high: float
    source: str
    """Source, with the reasons for both ends."""

    def value_at(self, quantile: float) -> float:
        """Return the value at `quantile`: half of the draws are on either side of the best value.

        Quantiles from -1 to 0 and from 1 to 2 are outside the range, up to the factor `REACH`.
        """
        exact = {LOW: self.low, BEST: self.best, HIGH: self.high}
        if quantile in exact:
            return exact[quantile]
        what = self.key.rpartition(".")[2]
        if quantile < LOW:
            value = self.low * REACH**quantile
        elif quantile > HIGH:
            value = self.high * REACH ** (quantile - HIGH)
            value = min(value, 1.0) if what in FRACTION_KEYS else value
        elif quantile < BEST:
            value = self.low + (self.best - self.low) * quantile / BEST
        else:
            value = self.best + (self.high - self.best) * (quantile - BEST) / (HIGH - BEST)
        return max(1.0, float(round(value))) if what in COUNTED_KEYS else value

    @property
    def around(self) -> dict[float, float]:
        """Return rising values in and around the range with their quantiles; for counts, every integer in the range."""
        quantiles = [step / PER_RANGE for step in range(-PER_RANGE, 2 * PER_RANGE + 1)]
        if self.key.rpartition(".")[2] in COUNTED_KEYS:
            for side, best in ((self.low, LOW), (self.high, HIGH)):
                steps = round(abs(side - self.best))
                quantiles += [BEST + (best - BEST) * step / steps for step in range(1, steps)]
        return {self.value_at(quantile): quantile for quantile in sorted(quantiles)}


def unknowns(system: System) -> tuple[Unknown, ...]:
    """Return all numbers of `system` with a range, including assumed numbers.

    The result is empty for a system whose operators and collectives `repro calibrate` measured.
    """
    if system.device.operators:
        return ()
    return tuple(make_unknown(key, number) for key, number in _quantities(system) if number.ranges)


def make_unknown(key: str, number: Quantity) -> Unknown:
    """Return a known number with its range."""
    low, best, high = number.ends
    return Unknown(key=key, low=low, best=best, high=high, source=number.source)


def with_values(system: System, values: Mapping[str, float]) -> System:
    """Return `system` with other values of these keys, which then have no range."""
    known = dict(_quantities(system))
    for key, value in values.items():
        number = Quantity(value=value, source=known[key].source)
        system = _replaced(system, key, number)
    return system


def drawn(system: System, case: QuantileCase, only: Collection[str] | None = None) -> System:
    """Return `system` with the values of `case`; `only`: of these keys, with all others at their best values."""
    moved = {
        one.key: value
        for one in unknowns(system)
        if (only is None or one.key in only)
        and (value := one.value_at(case.quantile_of(one.key))) != one.best
    }
    return with_values(system, moved)


@cache
def _column(key: str) -> tuple[float, ...]:
    random = Random(key)
    strata = list(range(DRAWS))
    random.shuffle(strata)
    return tuple((stratum + random.random()) / DRAWS for stratum in strata)


def _quantities(system: System) -> Iterator[tuple[str, Quantity]]:
    """Yield every number with its key, known or assumed."""
    for name in _numbers(System):
        yield name, getattr(system, name)
    device = system.device
    for name in _numbers(type(device)):
        yield f"device.{name}", getattr(device, name)
    for precision, peak in device.peak_flops.items():
        yield f"device.peak_flops.{precision}", peak
    for name in _numbers(type(device.time)):
        yield f"device.time.{name}", device.time.used(name)
    for link, numbers in system.links.items():
        yield f"links.{link}.bandwidth", numbers.bandwidth
        for name in KEYS:
            yield f"links.{link}.{name}", numbers.used(link, name)


def _numbers(cls: type[object]) -> list[str]:
    return [field.name for field in fields(cls) if field.type == Quantity.__name__]  # type: ignore[arg-type]


def _replaced(system: System, key: str, number: Quantity) -> System:
    *place, name = key.split(".")
    device, changed = system.device, cast(Any, {name: number})
    match place:
        case ["device", "time"]:
            return replace(system, device=replace(device, time=replace(device.time, **changed)))
        case ["device", "peak_flops"]:
            return replace(system, device=replace(device, peak_flops=device.peak_flops | changed))
        case ["device"]:
            return replace(system, device=replace(device, **changed))
        case ["links", link]:
            return replace(system, links=system.links | {link: replace(system.links[link], **changed)})
    return replace(system, **changed)
