"""Calibration points without uncertain inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config.quantity import Quantity
from repro.simulate.time import calibration


def use_exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calibration points by points without ranges for products, passes over parameters and host time."""
    known = Quantity(value=1, source="measured")
    points = [
        replace(point, products=known, passes=known, operator_s=None)
        for point in calibration.calibration_points()
    ]
    monkeypatch.setattr(calibration, "calibration_points", lambda: points)
