"""Systems and networks for tests of predicted times: random, with changed links, or with exact calibration points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from repro.config import Layout
from repro.config.layout import ORDERS
from repro.config.quantity import Quantity
from repro.config.system import Link, System
from repro.config.systems import load_system_file
from repro.parallel.ledger import RING_PASSES
from repro.simulate.placement import GROUPS
from repro.simulate.time import calibration
from repro.simulate.time.network import Network

ops, groups, payloads = st.sampled_from(tuple(RING_PASSES)), st.sampled_from(GROUPS), st.integers(0, 1 << 34)


def number(value: float) -> Quantity:
    return Quantity(value=value, source="a test")


def numbers(**values: float) -> dict[str, Quantity]:
    return {key: number(value) for key, value in values.items()}


def network(system: str | System, **layout: Any) -> Network:
    return Network(load_system_file(system) if isinstance(system, str) else system, Layout(**layout))


def with_link(system: str | System, name: str, **values: float) -> System:
    """Return `system` with some numbers of one link class replaced."""
    system = load_system_file(system) if isinstance(system, str) else system
    link = replace(system.links[name], **numbers(**values))
    return replace(system, links={**system.links, name: link})


class Wire:
    """Network in which every message between pipeline stages takes `seconds`."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        return self.seconds


@st.composite
def networks(draw: st.DrawFn) -> tuple[System, Layout]:
    """Draw a system with numbers of any size, and a layout on a few of its nodes."""
    devices = draw(st.sampled_from([1, 2, 4, 8]))
    positive = st.floats(1e6, 1e12)
    names = draw(st.sampled_from([("nvlink", "inter-node"), ("pcie", "inter-node"), ("memory",)]))
    links = {}
    for name in names:
        optional = {
            "bandwidth": draw(positive),
            **{key: draw(st.floats(0, 1e-3)) for key in ("latency_s", "start_s", "chunk_s")},
            "efficiency": draw(st.floats(0.1, 1)),
            "pair": draw(st.sampled_from([1, 0.5, 0.167])),
            "half_bytes": draw(st.floats(0, 1e6)),
            "adapters": draw(st.integers(1, 16)),
            "rings": draw(st.integers(1, 16)),
            "switch": draw(st.integers(1, 8)),
            "pod": draw(st.integers(1, 4)),
            "oversubscription": draw(st.sampled_from([1, 1.5, 7])),
        }
        links[name] = Link(per=draw(st.sampled_from(["device", "node"])), **numbers(**optional))
    system = replace(load_system_file("dgx2"), devices_per_node=number(devices), links=links)
    degrees = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in ("tp", "dp", "pp")}
    return system, Layout(order=draw(st.sampled_from(ORDERS)), **degrees)


def use_exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calibration points by points without ranges for products, passes over parameters and host time."""
    known = Quantity(value=1, source="measured")
    points = [
        replace(point, products=known, passes=known, operator_s=None)
        for point in calibration.calibration_points()
    ]
    monkeypatch.setattr(calibration, "calibration_points", lambda: points)
