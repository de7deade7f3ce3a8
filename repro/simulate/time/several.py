"""Devices and networks of several systems at once, which differ in the values of their unknowns alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import numpy as np

from repro.config import Layout
from repro.config.system import System
from repro.simulate.time.device import DeviceCost, Kernels
from repro.simulate.time.network import Network


class SeveralDevices(DeviceCost):
    """`DeviceCost` of several systems that are not calibrated: every operator's seconds in all lanes, [systems]."""

    def __init__(self, systems: Sequence[System], precision: str, kernels: Sequence[Kernels], devices: int):
        each = [
            DeviceCost(system, precision, generation, devices)
            for system, generation in zip(systems, kernels, strict=True)
        ]
        super().__init__(systems[0], precision, devices=devices)
        assert not self.rates, "what was measured is not in doubt"
        for name, number in vars(self).items():
            if isinstance(number, (float, int)):
                vars(self)[name] = np.array([getattr(one, name) for one in each])
        self.kernels = Kernels(*(cast(float, np.array(of_lanes)) for of_lanes in zip(*kernels, strict=True)))


class SeveralNetworks:
    """`Network` of several systems: every message's seconds in all lanes, [systems]."""

    def __init__(self, systems: Sequence[System], layout: Layout):
        placed: dict[object, Network] = {}

        def network_of(system: System) -> Network:
            """Where groups lie is found once for all systems whose nodes have as many devices."""
            found = Network(system, layout, placed.get(system.devices_per_node))
            placed.setdefault(system.devices_per_node, found)
            return found

        keys = [(id(system.links), system.devices_per_node) for system in systems]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        networks = [network_of(systems[keys.index(key)]) for key in places]
        of_lane = np.array([places[key] for key in keys])

        def each(seconds: Callable[[Network], float]) -> float:
            """`seconds` of every lane, [lanes]; asked once of those that are alike."""
            return cast(float, np.array([seconds(network) for network in networks])[of_lane])

        self.layout, self.system = layout, systems[0]
        self.overlap_cost = each(lambda network: network.overlap_cost)
        self.messages = networks[0].messages
        """Of what was measured, which nothing is doubted of."""
        self.lanes = np.zeros(len(systems)).__add__
        """A number as lanes."""
        self.seconds: Callable[[str, str, int], float] = cache(
            lambda op, group, payload: each(lambda network: network.seconds(op, group, payload))
        )
        self._send = cache(
            lambda payload, source, to: each(
                lambda network: network.send_seconds(payload, from_stage=source, to_stage=to)
            )
        )

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Of `payload` bytes from each rank of a stage to its peer."""
        return self._send(payload, from_stage, to_stage)
