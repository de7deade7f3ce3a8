"""What a system's devices and links take for the layouts of a plan, and so the least that a step can; without torch.

A plan is made in a process that has no tensors: importing torch would keep it from workers for seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from repro.config import Layout, Model
from repro.config.system import System
from repro.simulate.plan.estimate import payloads
from repro.simulate.plan.least import least_seconds
from repro.simulate.time import calibration_points
from repro.simulate.time.calibration_points import CalibrationPoint
from repro.simulate.time.device import DeviceCost
from repro.simulate.time.network import Network

if TYPE_CHECKING:
    from repro.simulate.plan.shallow import LayoutFamily


def factor_of(generation: CalibrationPoint) -> float:
    """`efficiency.factor`, which traces a step, and so needs torch."""
    from repro.simulate.time import efficiency

    return efficiency.factor(generation)


class Rates:
    """Of one system; keeps what layouts share."""

    def __init__(self, system: System, factor: Callable[[CalibrationPoint], float] = factor_of):
        """`factor`: `factor_of`, or what has a worker do it."""
        self.system, self._factor = system, factor
        self._costs: dict[tuple[str, str], tuple[DeviceCost, float]] = {}
        self._networks: dict[Layout, Network] = {}

    def cost(self, layout: Layout) -> tuple[DeviceCost, float]:
        """Of operators, with the factor of the generation of software in it; `ConfigError` if numbers are missing."""
        key = layout.precision, layout.kernels
        if key not in self._costs:
            generation = calibration_points.calibration_point_of(layout.kernels, self.system)
            factor = self._factor(generation) if generation is not None else 1.0
            self._costs[key] = DeviceCost(self.system, layout.precision, factor, layout.world), factor
        return self._costs[key]

    def network(self, layout: Layout) -> Network:
        """The links as the groups of `layout` use them."""
        groups = groups_of(layout)
        if groups not in self._networks:
            self._networks[groups] = Network(self.system, groups)
        return self._networks[groups]

    def least(self, model: Model, layout: Layout, families: dict[str, LayoutFamily]) -> float:
        """Seconds that no step of `layout` takes less than; `ConfigError` as `cost`."""
        of_role = {name: family.work for name, family in families.items()}
        sent = payloads(model, layout, families).values()
        return least_seconds(model, layout, of_role, sent, self.cost(layout)[0], self.network(layout))


def groups_of(layout: Layout) -> Layout:
    """What networks need of `layout`."""
    return Layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, order=layout.order)
