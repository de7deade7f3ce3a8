"""Tests of distances between loss curves, with expected values computed by hand."""

from __future__ import annotations

import pytest

from repro.results.metrics import (
    FP32_ROUNDING,
    LOSS_STRETCH_STEPS,
    final_loss,
    loss_distances,
    relative_loss_distance,
)

FLAT = [2.0] * (3 * LOSS_STRETCH_STEPS)


def shifted(*relative: float) -> list[float]:
    """Return `FLAT` with a relative change of each stretch of steps."""
    return [2.0 * (1 + by) for by in relative for _ in range(LOSS_STRETCH_STEPS)]


def test_distances_are_relative_and_ignore_missing_losses() -> None:
    assert loss_distances([2.0, 2.2], [2.0, 2.0]) == pytest.approx([0, 0.1])
    assert loss_distances([None, 2.0], [2.0, 2.0]) == [0]


CONTROLS = [shifted(1e-6, 7e-6, 1e-5), shifted(-7e-6, 1e-6, 7e-5)]
"""Controls whose root mean square distances are 5e-6, 5e-6 and 5e-5."""


@pytest.mark.parametrize(
    ("curve", "controls", "distance"),
    [
        (shifted(5e-6, -2e-5, 5e-5), CONTROLS, 4),  # 1, 4 and 1 times the controls: the worst stretch counts
        (shifted(5e-6, -2e-5, 5e-5), CONTROLS[:1], 5),  # 5e-6 / 1e-6 in the first stretch
        (shifted(2e-7, 2e-5, 2e-3), [shifted(1e-7, 1e-5, 1e-3)], 2),
        (shifted(1e-4, 1e-5, 1e-3), [shifted(1e-7, 1e-5, 1e-3)], 1000),
        (shifted(0, 0, 4 * FP32_ROUNDING), [FLAT], 4),  # controls differ by the fp32 rounding or more
        (FLAT, [FLAT], 0),
    ],
)
def test_loss_distance_is_relative_to_the_controls(
    curve: list[float], controls: list[list[float]], distance: float
) -> None:
    assert relative_loss_distance(curve, FLAT, controls) == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize(
    ("curve", "controls"), [(FLAT, []), (FLAT[1:], [FLAT]), (FLAT, [FLAT[1:]]), ([None, *FLAT[1:]], [FLAT])]
)
def test_loss_distance_needs_controls_and_complete_losses(
    curve: list[float | None], controls: list[list[float]]
) -> None:
    with pytest.raises(ValueError, match="needs control runs, and the losses of all steps"):
        relative_loss_distance(curve, FLAT, controls)


def test_final_loss_is_the_mean_of_the_last_stretch() -> None:
    assert final_loss(shifted(0, 0.5, 0.25)) == pytest.approx(2.5)
    assert final_loss([None, *FLAT]) == 2.0
    for losses in (FLAT[: LOSS_STRETCH_STEPS - 1], [*FLAT, None]):
        with pytest.raises(ValueError, match="the losses of the last 50"):
            final_loss(losses)
