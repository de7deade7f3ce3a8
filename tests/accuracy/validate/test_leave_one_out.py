"""Test that intervals of an uncalibrated device cover published rates of calibrated devices."""

from __future__ import annotations

import pytest

from tests.accuracy.validate.leave_one_out import DEVICES, predicted_rates


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_intervals_without_calibration_cover_published_rates(device: str) -> None:
    """A sample of the rates; the module prints the table of docs/accuracy.md with all of them."""
    rates = predicted_rates(device, step=3)
    assert len(rates) >= 10
    covered = sum(rate.holds for rate in rates)
    assert covered >= 0.7 * len(rates), [rate.name for rate in rates if not rate.holds]
    assert {rate.rests_on for rate in rates} - {""} == {"uncalibrated"}, (
        "a step that does not fit has no calibration"
    )
