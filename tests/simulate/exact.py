"""Software whose kernels are known for certain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config.quantity import Quantity
from repro.simulate.time import calibration


def have_exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on which of a generation's kernels are slow is known, how slow passes over parameters are, and that its
    host takes as long for an operator as any."""
    known = Quantity(value=1, source="measured")
    points = [
        replace(one, products=known, passes=known, operator_s=None)
        for one in calibration.calibration_points()
    ]
    monkeypatch.setattr(calibration, "calibration_points", lambda: points)
