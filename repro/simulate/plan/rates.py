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
from repro.simulate.time.device import MODELLED, DeviceCost, Kernels
from repro.simulate.time.network import Network

if TYPE_CHECKING:
    from repro.simulate.plan.shallow import LayoutFamily


def kernels_of(generation: CalibrationPoint) -> Kernels:
    """`efficiency.kernels`, which traces a step, and so needs torch."""
    from repro.simulate.time import efficiency

    return efficiency.kernels(generation)


class Rates:
    """Of one system; keeps what layouts share."""

    def __init__(self, system: System, kernels: Callable[[CalibrationPoint], Kernels] = kernels_of):
        """`kernels`: `kernels_of`, or what has a worker do it."""
        self.system, self._kernels = system, kernels
        self._costs: dict[tuple[str, str], DeviceCost] = {}
        self._networks: dict[Layout, Network] = {}

    def cost(self, layout: Layout) -> DeviceCost:
        """Of operators, with the kernels of the generation of software; `ConfigError` if numbers are missing."""
        key = layout.precision, layout.kernels
        if key not in self._costs:
            generation = calibration_points.calibration_point_of(layout.kernels, self.system)
            kernels = self._kernels(generation) if generation is not None else MODELLED
            self._costs[key] = DeviceCost(self.system, layout.precision, kernels, layout.world)
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
        return least_seconds(model, layout, of_role, sent, self.cost(layout), self.network(layout))


def groups_of(layout: Layout) -> Layout:
    """What networks need of `layout`."""
    return Layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, order=layout.order)
