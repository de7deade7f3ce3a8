"""What the time of a step depends on and nobody knows for certain: asked of every record, so without torch."""

from __future__ import annotations

from repro.config.quantity import Quantity
from repro.config.system import System
from repro.config.systems.unknowns import Unknown, unknown, unknowns
from repro.simulate.time.calibration_points import CalibrationPoint

TIMED = ("device.", "links.")
"""Beginnings of the keys that time depends on."""
UNCALIBRATED = unknown(
    "kernels",
    Quantity(
        value=1,
        low=0.99,
        high=1.6,
        source="no run calibrates these kernels on this device, and they take what shapes and bandwidth allow; low: "
        "the least that one of the generations takes which a published point calibrates; high: the most",
    ),
)
"""Seconds of kernels without a published point over the modelled ones."""


def uncertain(system: System, generation: CalibrationPoint | None) -> list[Unknown]:
    """What the time of a step on `system` depends on and nobody knows for certain."""
    found = [one for one in unknowns(system) if one.key.startswith(TIMED)]
    if system.device.operators:
        return found
    return [*found, *((UNCALIBRATED,) if generation is None else generation.unknowns)]
