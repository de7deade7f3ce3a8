"""Pipeline schedules as the runner executes them (2104.04473 fig. 3-4), with what each leaves idle."""

from __future__ import annotations

from repro.parallel.pipeline.schedule import bubble, build, in_flight, timeline
from repro.report.figures import schedule_drawing
from repro.report.figures.style import Drawing, canvas
from repro.report.figures.values import View
from repro.util import units

ID, TITLE = "schedules", "Pipeline schedules, and what they leave idle"
STAGES, MICRO_BATCHES = 4, 8
"""Of the paper's figures."""
SHOWN = (("gpipe", "GPipe", 1), ("1f1b", "1F1B with flush", 1), ("interleaved", "Interleaved 1F1B", 2))
TWINS = {
    "gpipe": "meg2-bubble/GPipe, p = 2, m = 4: idle over compute time",
    "1f1b": "meg2-bubble/1F1B, p = 2, m = 4: idle over compute time",
    "interleaved": "meg2-bubble/interleaved, p = 2, m = 4, v = 2: idle over compute time",
}
RUN = "repro run suites/smoke.toml --only 'bubble-*'"


def draw(view: View) -> Drawing:
    """One panel a schedule, one line a stage; beside it the bubble: counted, and measured on its twin."""
    figure, grid = canvas(5.6, len(SHOWN), 1, sharex=True)
    records: list[str] = []
    missing, longest = False, 0.0
    for axes, (name, title, chunks) in zip(grid, SHOWN, strict=True):
        schedule = build(name, STAGES, MICRO_BATCHES, chunks)
        rows = timeline(schedule)
        end = float(rows[0][-1].stop)
        schedule_drawing.draw(axes, rows, (0.0, end), (72 * 8.5, 18))
        longest = max(longest, end)
        row = view.row(TWINS[name])
        measured = next((f for f in row.findings if f.kind == "measured"), None)
        twin = "twin not measured"
        if measured is not None and isinstance(measured.value, int | float):
            twin = (
                f"twin of {row.row.label.partition(': ')[0].partition(', ')[2]}: measured {measured.text} %"
            )
            twin += f", formula {units.number(float(measured.expected or 0))} %"
            records += [name for name in measured.experiments if name not in records]
        missing = missing or twin == "twin not measured"
        kept = max(in_flight(actions) for actions in schedule)
        idle = float(bubble(schedule))
        half = f", 1/{chunks} of a stage each" if chunks > 1 else ""
        axes.set_title(
            f"{title}: idle for {units.percent(idle)} of its compute time (counted), activations of at most {kept} "
            f"micro-batches kept{half}\n{twin}",
            fontsize=8.5,
            fontweight="normal",
        )
        axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
    grid[-1].set_xlim(0, longest)
    grid[-1].set_xlabel("time, in forward passes of a stage (backward takes two)")
    caption = (
        f"{STAGES} stages, {MICRO_BATCHES} micro-batches, as in the paper's figures 3 and 4; counted on the schedule "
        "that the runner executes. Forward is blue, backward orange; the number is the micro-batch; paler cells are a "
        "stage's second chunk of layers. Twins run two stages here. Claim: meg2-bubble. `repro schedule` draws others."
    )
    return Drawing(ID, TITLE, caption, tuple(records), RUN if missing else "", figure)
