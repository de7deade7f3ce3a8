"""Figures of the HTML report, drawn from experiment records in the common style of the module `style`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.report.figures import (
    comparisons,
    layout_fit,
    loss_curves,
    peak_memory,
    predicted_steps,
    redrawn,
    schedules,
    validation,
    zero_stages,
)
from repro.report.figures.style import Drawing, Record, figure_style
from repro.report.figures.values import View

if TYPE_CHECKING:
    from repro.accuracy.validate.implied_inputs import ImpliedInput
    from repro.accuracy.validate.published import Point
    from repro.claims.verdicts import ClaimResult
    from repro.results.schema import ComparisonRecord


def draw_all(
    experiments: list[Record],
    compared: list[ComparisonRecord],
    simulated: Sequence[Record] = (),
    points: Sequence[Point] = (),
    judged: Sequence[ClaimResult] = (),
    needs: Sequence[ImpliedInput] = (),
) -> list[Drawing]:
    """Return every figure of the HTML report. A figure without records has no picture, but a command that creates them.

    `experiments`: measured records. `compared`: comparisons of alternately run experiments. `simulated`: simulated
    records. `points`: published values with their predictions. `judged`: results of all claims; if empty, the figures
    that redraw published ones are omitted. `needs`: uncertain inputs with the values that published results imply.
    """
    found = list(simulated)
    view = View(judged, found) if judged else None
    published = view.value("", comparisons.SPEEDUP_ROW).published if view else None
    with figure_style():
        drawings = [
            zero_stages.draw_measured_states(experiments),
            zero_stages.draw_volume(experiments),
            loss_curves.draw_parity(experiments),
            loss_curves.draw_convergence(experiments),
            comparisons.draw_engines(experiments, compared),
            comparisons.draw_bandwidth_sweeps(experiments, compared, published.value if published else None),
            peak_memory.draw_peaks(experiments),
            predicted_steps.draw_machine(experiments, found),
        ]
        if view:
            drawings += [
                zero_stages.draw_published_states(view, found),
                *(redrawn.draw_entry(entry, view) for entry in redrawn.load_entries()),
                layout_fit.draw_degrees(view, found),
                predicted_steps.draw_breakdown(view, found),
                schedules.draw_schedules(view),
                peak_memory.draw_timelines(found),
                zero_stages.draw_link_traffic(found),
            ]
        return [
            *drawings,
            validation.draw_implied(needs),
            layout_fit.draw_maps(found),
            validation.draw_validation(points),
        ]
