"""What the tests of the simulation share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config.quantity import Quantity
from repro.simulate.time import calibration_points


@pytest.fixture
def exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every generation's kernels without what is not known of them."""
    known = Quantity(value=1, source="measured")
    points = [replace(one, products=known) for one in calibration_points.calibration_points()]
    monkeypatch.setattr(calibration_points, "calibration_points", lambda: points)
