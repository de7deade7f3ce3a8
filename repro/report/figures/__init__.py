"""Figures of the report, one per module, drawn from records.

`style` holds their common style. `page` embeds the figures, and commands write them as files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.report.figures import (
    breakdown,
    communication,
    comparison,
    convergence,
    degrees,
    engines,
    implied,
    link_traffic,
    loss,
    maps,
    measured_states,
    memory_timeline,
    model_states,
    peak,
    predicted,
    redrawn,
    redrawn_entries,
    schedules,
    validation,
    windtunnel,
)
from repro.report.figures.style import Drawing, Record, look
from repro.report.figures.values import View

if TYPE_CHECKING:
    from repro.accuracy.validate.implied import Implied
    from repro.accuracy.validate.published import Point
    from repro.claims.verdicts import ClaimResult
    from repro.results.schema import ComparisonRecord


def draw_all(
    experiments: list[Record],
    comparisons: list[ComparisonRecord],
    simulated: Sequence[Record] = (),
    points: Sequence[Point] = (),
    judged: Sequence[ClaimResult] = (),
    needs: Sequence[Implied] = (),
) -> list[Drawing]:
    """Every figure, in the order of the page; one without records has no picture and says what to run.

    `simulated` records have figures of their own: no picture mixes them with what was measured, but the one that
    compares the two.  `points`: published values with their predictions.  `judged`: the ledger; without it no
    figure of a source is redrawn.  `needs`: what published values need of unknowns.
    """
    found = list(simulated)
    view = View(judged, found) if judged else None
    published = view.value("", windtunnel.CLAIM).published if view else None
    with look():
        drawings = [
            measured_states.draw(experiments),
            communication.draw(experiments),
            loss.draw(experiments),
            convergence.draw(experiments),
            comparison.draw(comparisons),
            engines.draw(experiments, comparisons),
            windtunnel.draw(experiments, comparisons, published.value if published else None),
            peak.draw(experiments),
            predicted.draw(experiments, found),
        ]
        if view:
            drawings += _of_sources(view, found)
        return [*drawings, implied.draw(needs), maps.draw(found), validation.draw(points)]


def _of_sources(view: View, simulated: list[Record]) -> list[Drawing]:
    """What the reports show, with ours beside it; then what only a simulation can show of the same runs."""
    return [
        model_states.draw(view, simulated),
        *(redrawn.draw(entry, view) for entry in redrawn_entries.load()),
        degrees.draw(view, simulated),
        breakdown.draw(view, simulated),
        schedules.draw(view),
        memory_timeline.draw(simulated),
        link_traffic.draw(simulated),
    ]
