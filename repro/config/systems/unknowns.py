"""Uncertain inputs of a system ("unknowns"), and a system whose uncertain inputs vary over many sampled cases.

A case gives every unknown a quantile: 0 at the low end of its range, 1/2 at the best value, 1 at the high end. The
quantiles of a key are equal for all systems and runs, so that two predictions can be compared case by case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from repro.config.links import KEYS
from repro.config.quantity import Quantity
from repro.config.system import System

if TYPE_CHECKING:
    import numpy.typing as npt

Lanes: TypeAlias = "npt.NDArray[Any]"
"""Values of one uncertain input as an array, with one entry for each set of values that a simulation samples."""
PACE = "device.time.pace"
"""Key of the ratio of kernel times in a run to kernel times on the device for which the time model is calibrated."""
SPREAD = "device.time.spread"
"""Key of the relative standard deviation of kernel times between the devices of a run."""
PER_RANGE = 4
"""Number of steps across the range of an uncertain input, in simulations that vary this number alone."""
DRAWS = 64
"""Number of sampled sets of values in which all uncertain inputs vary jointly at random."""
MAX_CASES = 32
"""Maximum number of sets of uncertain inputs (such as those of one system) whose sampled values are cached."""
COUNTED_KEYS = ("rings", "adapters", "switch", "pod", "multiprocessors", "devices_per_node", "nodes")
"""Last part of the dotted system-file keys (`links.inter-node.rings`) whose uncertain inputs are integers."""
FRACTION_KEYS = (
    *("efficiency", "matmul_efficiency", "unthrottled_efficiency", "memory_efficiency"),
    *("overlap_cost", "pair"),
)
"""Last part of the dotted system-file keys whose uncertain inputs are fractions of at most 1."""
LOW, BEST, HIGH = 0.0, 0.5, 1.0
"""Quantiles that represent the low end of an uncertain input's range, its best value and the high end."""
REACH = 4.0
"""Factor by which values may leave an uncertain range: quantile -1 is low / REACH, and quantile 2 is high * REACH."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Uncertain input of a system: its best value and its range."""

    key: str
    """Dotted key of the number in the system file, such as `links.inter-node.rings`."""
    low: float
    best: float
    high: float
    source: str
    """Source of the number's best value, with the reasons for both ends of its range."""

    def values_at(self, quantiles: float | Sequence[float] | Lanes) -> Lanes:
        """Return the number's value at each quantile, linear between low end, best value (1/2) and high end.

        Quantiles from -1 to 0 and from 1 to 2 give values outside the range, up to the factor `REACH`.
        """
        import numpy as np  # imported here, since most commands do not need numpy

        quantiles = np.asarray(quantiles)
        inside = np.clip(quantiles, LOW, HIGH)
        below = self.low + (self.best - self.low) * inside / BEST
        above = self.best + (self.high - self.best) * (inside - BEST) / (HIGH - BEST)
        values: Lanes = np.where(inside < BEST, below, np.where(inside < HIGH, above, self.high))
        values = values * REACH ** (quantiles - inside)
        if self._last_word in FRACTION_KEYS:
            return np.minimum(values, 1.0)
        return np.maximum(np.round(values), 1.0) if self._last_word in COUNTED_KEYS else values

    @cached_property
    def around(self) -> dict[float, float]:
        """Return values of an uncertain input in and around its range, with quantiles; for counts, every integer."""
        quantiles = [step / PER_RANGE for step in range(-PER_RANGE, 2 * PER_RANGE + 1)]
        if self._last_word in COUNTED_KEYS:
            for side, best in ((self.low, LOW), (self.high, HIGH)):
                steps = round(abs(side - self.best))
                quantiles += [BEST + (best - BEST) * step / steps for step in range(1, steps)]
        quantiles.sort()
        # Numbers of the system file remain int or float as in the file, since records contain a digest of their text.
        in_file = {LOW: self.low, BEST: self.best, HIGH: self.high}
        values = self.values_at(quantiles).tolist()
        return {in_file.get(one, value): one for one, value in zip(quantiles, values, strict=True)}

    @property
    def moves(self) -> list[float]:
        """Return the number's quantiles in simulations in which other uncertain inputs have their best values."""
        return sorted({LOW, HIGH, *self.around.values()})

    @property
    def _last_word(self) -> str:
        return self.key.rpartition(".")[2]


def unknowns(system: System) -> tuple[Unknown, ...]:
    """Return all uncertain inputs of `system`, including assumed numbers; none if the system is calibrated."""
    if system.device.operators:
        return ()
    return tuple(make_unknown(key, number) for key, number in _quantities(system) if number.ranges)


def make_unknown(key: str, number: Quantity) -> Unknown:
    """Return an uncertain input as an `Unknown` with the key `key`, its best value, its range and its source."""
    low, best, high = number.ends
    return Unknown(key=key, low=low, best=best, high=high, source=number.source)


@lru_cache(maxsize=MAX_CASES)
def quantiles_in_cases(found: tuple[Unknown, ...]) -> dict[str, Lanes]:
    """Return the quantiles of the uncertain inputs in all sampled cases: an array [cases] for each key.

    The first case has the best values. In the next cases, one uncertain input takes one of its `Unknown.moves`. The
    last `DRAWS` cases are joint draws from a Latin hypercube, whose columns depend on the key alone.
    """
    import numpy as np

    moves = [(one.key, quantile) for one in found for quantile in one.moves]
    return {
        one.key: np.array(
            [BEST, *(quantile if key == one.key else BEST for key, quantile in moves), *_column(one.key)]
        )
        for one in found
    }


def drawn(system: System, quantiles: Mapping[str, Lanes]) -> System:
    """Return `system` with the uncertain inputs in `quantiles` replaced by arrays of values at these quantiles."""
    found = (one for one in unknowns(system) if one.key in quantiles)
    return with_values(system, {one.key: one.values_at(quantiles[one.key]) for one in found})


def with_values(system: System, values: Mapping[str, float | Lanes]) -> System:
    """Return `system` with new values of the numbers with the given keys, which then have no range.

    A value may be an array with one entry for each sampled case. Values are not checked.
    """
    for key, value in values.items():
        system = _replaced(system, key.split("."), value)
    return system


def _column(key: str) -> list[float]:
    """Return an uncertain input's quantile in each joint draw: a value in each of `DRAWS` equal strata, shuffled."""
    random = Random(key)
    strata = list(range(DRAWS))
    random.shuffle(strata)
    return [(stratum + random.random()) / DRAWS for stratum in strata]


def _quantities(system: System) -> Iterator[tuple[str, Quantity]]:
    """Yield every number of a system with its dotted key; assumed values replace uncertain inputs."""
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


def _replaced(owner: Any, path: Sequence[str], value: float | Lanes) -> Any:
    """Return a copy of a dataclass or dictionary in which the number at the nested keys `path` has a new value."""
    name, *inside = path
    changed = copy(owner)
    entries = changed if isinstance(owner, dict) else vars(changed)
    if inside:
        entries[name] = _replaced(entries[name], inside, value)
    else:
        entries[name] = copy(entries[name])
        vars(entries[name]).update(value=value, low=None, high=None)
    return changed
