"""Devices and networks of several systems at once, which differ in the values of their unknowns alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Generic, TypeVar, cast

import numpy as np

from repro.config import Layout
from repro.config.system import System
from repro.simulate.time.device import DeviceCost, Kernels
from repro.simulate.time.lanes import Lanes
from repro.simulate.time.network import Network

T = TypeVar("T")


class _Alike(Generic[T]):
    """What every lane has, made once for those that are alike."""

    def __init__(self, keys: Sequence[Hashable], made: Callable[[int], T]):
        """`made`: of the lane with this number, which stands for all of the same key."""
        first = {key: keys.index(key) for key in dict.fromkeys(keys)}
        self._all = [made(number) for number in first.values()]
        order = list(first)
        self._of_lane = np.array([order.index(key) for key in keys])

    def each(self, seconds: Callable[[T], float]) -> Lanes:
        """`seconds` of every lane, [lanes]."""
        return cast(Lanes, np.array([seconds(one) for one in self._all])[self._of_lane])


class SeveralDevices(DeviceCost):
    """`DeviceCost` of several systems that are not calibrated: every operator's seconds in all lanes, [systems]."""

    def __init__(self, systems: Sequence[System], precision: str, kernels: Sequence[Kernels], devices: int):
        each = [
            DeviceCost(system, precision, generation, devices)
            for system, generation in zip(systems, kernels, strict=True)
        ]
        super().__init__(systems[0], precision, devices=devices)
        assert not self.rates, "what was measured is not in doubt"
        for name, number in vars(each[0]).items():
            if isinstance(number, (float, int)):
                vars(self)[name] = np.array([getattr(one, name) for one in each])
        self.kernels = Kernels(*(cast(float, np.array(of_lanes)) for of_lanes in zip(*kernels, strict=True)))


class SeveralNetworks:
    """`Network` of several systems: every message's seconds in all lanes, [systems]."""

    def __init__(self, systems: Sequence[System], layout: Layout):
        keys = [(id(system.links), system.devices_per_node) for system in systems]
        placed: dict[object, Network] = {}

        def network_of(lane: int) -> Network:
            """Where groups lie is found once for all systems whose nodes have as many devices."""
            system = systems[lane]
            found = Network(system, layout, placed.get(system.devices_per_node))
            placed.setdefault(system.devices_per_node, found)
            return found

        networks = _Alike(keys, network_of)
        self.layout, self.system = layout, systems[0]
        self.overlap_cost = cast(float, networks.each(lambda network: network.overlap_cost))
        self.messages = network_of(0).messages
        """Of what was measured, which nothing is doubted of."""
        self.lanes = np.zeros(len(systems)).__add__
        """A number as lanes."""
        self.seconds: Callable[[str, str, int], float] = cache(
            lambda op, group, payload: cast(
                float, networks.each(lambda network: network.seconds(op, group, payload))
            )
        )
        self._send = cache(
            lambda payload, source, to: cast(
                float,
                networks.each(lambda network: network.send_seconds(payload, from_stage=source, to_stage=to)),
            )
        )

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Of `payload` bytes from each rank of a stage to its peer."""
        return self._send(payload, from_stage, to_stage)
