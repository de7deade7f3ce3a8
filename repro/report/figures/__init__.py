"""The report's figures, one a module; each is drawn from records and says which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.report.figures import communication, comparison, loss, maps, peak, states, validation
from repro.report.figures.style import Drawing, Record, look

if TYPE_CHECKING:
    from repro.report.validate import Point


def draw_all(
    experiments: list[Record],
    comparisons: list[Record],
    simulated: Sequence[Record] = (),
    points: Sequence[Point] = (),
) -> list[Drawing]:
    """Every figure, in the order of the page; one without records has no picture and says what to run.

    ``simulated`` records have figures of their own: no picture mixes them with what was measured.  ``points``:
    published values with their predictions.
    """
    with look():
        return [
            states.draw(experiments),
            communication.draw(experiments),
            loss.draw(experiments),
            comparison.draw(comparisons),
            peak.draw(experiments),
            maps.draw(list(simulated)),
            validation.draw(points),
        ]
