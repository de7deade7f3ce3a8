"""Provide the arrays of a system whose uncertain inputs vary over cases, and the system of one case."""

from __future__ import annotations

from typing import Any

import numpy as np

from repro.config.quantity import Quantity
from repro.config.system import System
from repro.config.systems.unknowns import Lanes, with_values


def array_values(system: System) -> dict[str, Lanes]:
    """Return the numbers of a system that are arrays, by key."""
    device = system.device
    parts: dict[str, Any] = {f"device.{key}": one for key, one in vars(device).items()}
    parts |= {f"device.time.{key}": one for key, one in vars(device.time).items()}
    parts |= {f"device.peak_flops.{key}": one for key, one in device.peak_flops.items()}
    for name, link in system.links.items():
        parts |= {f"links.{name}.{key}": one for key, one in vars(link).items()}
    numbers = {key: one.value for key, one in parts.items() if isinstance(one, Quantity)}
    return {key: value for key, value in numbers.items() if isinstance(value, np.ndarray)}


def system_of_case(system: System, case: int) -> System:
    """Return `system` with its arrays replaced by their values in one case."""
    return with_values(system, {key: value[case].item() for key, value in array_values(system).items()})
