"""Figures of pipeline schedules: one row per stage, time to the right.

Every forward or backward pass is a cell if the cells are wide enough. A picture of a larger schedule shows the shares
of forward and backward over the full step, and below them all passes at the begin and at the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from repro.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    TimedAction,
    bubble_ratio,
    build_schedule,
    in_flight,
    timeline,
)
from repro.report.figures.style import (
    GREEN,
    GRID,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Drawing,
    draw_fills_above,
    make_axes,
)
from repro.report.figures.values import View
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from repro.simulate.time.breakdown import Span
    from repro.simulate.time.schedule import Timeline


PICTURE_WIDTH_INCHES = 13.0
"""Width in inches of the picture of a pipeline schedule that `repro schedule` writes."""
MIN_ACTION_POINTS = 2.5
"""Minimum width in points of a drawn pass; with shorter passes, colours show time shares of forward and backward."""
MIN_MERGED_POINTS = 1.2
"""Minimum width in points of the equal intervals of a step in which shares of forward and backward are drawn."""
MIN_NUMBER_POINTS, MAX_NUMBER_POINTS = 4.5, 8.5
"""Minimum and maximum font size in points of micro-batch numbers in a drawn schedule; smaller numbers are omitted."""
TimedRows = Sequence[Sequence[TimedAction]]
"""Forward and backward passes of each stage with start and stop times, from `parallel.pipeline.schedule.timeline`."""

ACTION_COLOURS = {FORWARD: "#0072b2", BACKWARD: "#e69f00"}
CHUNK_COLOURS = {FORWARD: ("#00568c", "#9bd0f0"), BACKWARD: ("#d07f00", "#fbe3a6")}
"""Colours of the first and the last model chunk of a stage: blue for forward and orange for backward passes."""


def action_colours(kind: str, chunk: int = 0, chunks: int = 1) -> tuple[str, str]:
    """Return the text colour and the fill colour of a pass in a pipeline schedule, each as `#rrggbb`."""
    fill = ACTION_COLOURS[kind]
    if chunks > 1:
        first, last = (_channels(colour) for colour in CHUNK_COLOURS[kind])
        mixed = (a + (b - a) * chunk / (chunks - 1) for a, b in zip(first, last, strict=True))
        fill = "#" + "".join(f"{round(channel):02x}" for channel in mixed)
    # By the relative luminance of WCAG 2, black text has more contrast than white on colours above about 0.18.
    parts = [value / 255 for value in _channels(fill)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return ("#000000" if light > 0.18 else "#ffffff"), fill


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def busy_shares(row: Sequence[TimedAction], total: float, columns: int) -> list[tuple[float, float]]:
    """Return the shares of time of forward and of backward on a stage, in each of `columns` equal parts of the step."""
    scale = columns / total
    forward, backward = [0.0] * columns, [0.0] * columns
    for action, start, stop in row:
        first, last = float(start) * scale, float(stop) * scale
        shares = forward if action.kind == FORWARD else backward
        for column in range(int(first), min(columns, ceil(last))):
            shares[column] += max(0.0, min(last, column + 1) - max(first, column))
    return list(zip(forward, backward, strict=True))


def draw_picture(rows: TimedRows, title: str, facts: str) -> Figure:
    """Draw a pipeline schedule of all stages, with its `title` and one line of text with its properties (`facts`)."""
    stages, total = len(rows), float(max(row[-1].stop for row in rows))
    times = {slot.action.kind: float(slot.stop - slot.start) for slot in rows[0]}
    width = 72 * (PICTURE_WIDTH_INCHES - 1)
    windows, titles = [(0.0, total)], [facts]
    heights = [min(0.42, max(0.16, 6 / stages))]
    span = min(times.values()) * width / MIN_ACTION_POINTS
    merged = span < total
    if merged:
        span = min(span, (stages + 3) * sum(times.values()) * _count_chunks(rows), total / 2)
        span = float(int(span)) if span >= 10 else span
        windows += [(0.0, span), (total - span, total)]
        heights = [min(0.25, max(0.045, 2.6 / stages))] + 2 * [min(0.32, max(0.1, 4.5 / stages))]
        titles[0] += "\nThe full step, with colours mixed by the share of time of each kind of action"
        titles += [
            f"Forward and backward passes in the {end} {span:,.6g} units of time" for end in ("first", "last")
        ]

    tall = [stages * height for height in heights]
    size = 1.1 + sum(tall) + 0.7 * len(tall)
    figure, grid = make_axes(size, len(tall), width=PICTURE_WIDTH_INCHES, height_ratios=tall, squeeze=False)
    for axes, window, height, words in zip(grid[:, 0], windows, heights, titles, strict=True):
        if merged and axes is grid[0, 0]:
            columns = min(width / MIN_MERGED_POINTS, total / sum(times.values()))
            _draw_merged(axes, rows, total, round(columns))
        else:
            draw_actions(axes, rows, window, (width, 72 * height))
        every = ceil(0.17 / height)
        axes.set_yticks(range(0, stages, every), [f"stage {stage}" for stage in range(0, stages, every)])
        axes.set_title(words, fontweight="normal")
        right_axis = axes.secondary_yaxis("right")
        live = (in_flight([slot.action for slot in row]) for row in rows[::every])
        right_axis.set_yticks(range(0, stages, every), [str(count) for count in live])
        right_axis.set_ylabel("in flight")
        right_axis.tick_params(length=0)
        right_axis.spines["right"].set_visible(False)
    numbers = "; numbers are micro-batches" if grid[-1, 0].texts else ""
    grid[-1, 0].set_xlabel(f"time{numbers}")
    figure.suptitle(title, x=0.005, ha="left", fontsize=13, fontweight="bold")
    _draw_legend(figure, _count_chunks(rows))
    return figure


def draw_actions(
    axes: Axes,
    rows: TimedRows,
    window: tuple[float, float],
    points: tuple[float, float],
    bottom: float = 0.42,
) -> None:
    """Draw every forward and backward pass between the two times of `window`, with its micro-batch number if it fits.

    `points`: approximate width of the axes and height of a row, in points. `bottom`: lower edge of the passes below
    the centre of a row, in row heights. One path per colour limits the file size.
    """
    first, last = window
    chunks, scale = _count_chunks(rows), points[0] / (last - first)
    digits = len(str(max(slot.action.micro_batch for slot in rows[0])))
    idle, cells, shortest = [(first, last - first)], defaultdict(list), last - first
    for stage, row in enumerate(rows):
        low, high = stage - 0.42, stage + bottom
        axes.broken_barh(idle, (low, high - low), facecolors=GRID, lw=0)
        for action, start, stop in row:
            left, right = max(first, float(start)), min(last, float(stop))
            if left >= right:
                continue
            ink, fill = action_colours(action.kind, action.chunk, chunks)
            shortest = min(shortest, float(stop - start))
            cells[fill].append((left, low, right, high))
            size = min(MAX_NUMBER_POINTS, 0.6 * points[1], ((right - left) * scale - 2) / (0.62 * digits))
            if size >= MIN_NUMBER_POINTS:
                kw: dict[str, Any] = {"ha": "center", "va": "center", "in_layout": False}
                number = str(action.micro_batch)
                axes.text((left + right) / 2, (low + high) / 2, number, color=ink, fontsize=size, **kw)
    for fill, found in cells.items():
        draw_cells(axes, fill, found, min(0.7, 0.2 * scale * shortest))
    axes.set(xlim=(first, last), ylim=(len(rows) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


GROUP_COLOURS = {"tp": VERMILION, "cp": SKY, "dp": GREEN, "pp": YELLOW}
"""Colours of communication by process group; groups with other names belong to data parallelism."""
STEP_COLOURS = dict(zip(("forward", "backward"), ACTION_COLOURS.values(), strict=True))
STEP_COLOURS |= {"update": PURPLE, "waiting": GRID}
STEP_COLOURS |= {f"{group} messages": colour for group, colour in GROUP_COLOURS.items()}
COMPUTE_BOTTOM = 0.08
"""Lower edge of drawn computation below the centre of a stage's row, in row heights; communication is below it."""


def draw_step(axes: Axes, step: Timeline, points: tuple[float, float]) -> None:
    """Draw a predicted step in ms, one row per stage: passes, waits within them, and communication by process group.

    `points`: approximate width of the axes and height of a row, in points. Communication after the end of the step is
    also drawn at the beginning, because the preceding step ends with the same communication.
    """
    from repro.simulate.time.program import COMPUTE

    actions: dict[tuple[int, str], list[Span]] = defaultdict(list)
    intervals: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    period, begin = step.step_s, max(span.stop for span in step.spans if span.stream == COMPUTE) - step.step_s

    def in_ms(time: float) -> float:
        return 1e3 * (time - begin)

    for span in step.spans:
        if span.stream == COMPUTE:
            actions[span.stage, span.name].append(span)
        for stream, _, start, seconds in span.kernels():
            if stream != COMPUTE:
                group, stop = stream.partition(",")[0], start + seconds
                shown = intervals[f"{group if group in GROUP_COLOURS else 'dp'} messages"]
                shown += (span.stage, start, stop), (span.stage, start - period, stop - period)
                intervals["waiting"] += [(span.stage, start, stop)] if span.block else []
    rows: list[list[TimedAction]] = [[] for _ in step.stages]
    for (stage, name), spans in actions.items():
        kind, _, number = name.partition(" ")
        if number:
            action = Action(FORWARD if kind == "forward" else BACKWARD, int(number))
            times = (Fraction(in_ms(time)) for time in (spans[0].start, spans[-1].stop))
            rows[stage].append(TimedAction(action, *times))
            intervals["waiting"] += [(stage, one.stop, after.start) for one, after in pairwise(spans)]
        else:
            intervals["update"] += [(stage, span.start, span.stop) for span in spans]
    draw_actions(axes, rows, (0.0, 1e3 * period), points, COMPUTE_BOTTOM)
    bounds = dict.fromkeys(STEP_COLOURS, (-0.42, COMPUTE_BOTTOM))
    height = (0.42 - COMPUTE_BOTTOM) / len(GROUP_COLOURS)
    for lane, group in enumerate(GROUP_COLOURS):
        bounds[f"{group} messages"] = COMPUTE_BOTTOM + lane * height, COMPUTE_BOTTOM + (lane + 1) * height
    for what, found in intervals.items():
        low, high = bounds[what]
        cells = [(in_ms(start), stage + low, in_ms(stop), stage + high) for stage, start, stop in found]
        draw_cells(axes, STEP_COLOURS[what], cells)
    narrow = {"ncols": len(STEP_COLOURS), "columnspacing": 1.2, "handlelength": 1.2, "handletextpad": 0.5}
    draw_fills_above(axes, STEP_COLOURS, loc="lower center", bbox_to_anchor=(0.5, 1), **narrow)
    ticks = {stage + (COMPUTE_BOTTOM - 0.42) / 2: f"stage {stage}" for stage in range(len(rows))}
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("time (ms)")


def draw_cells(
    axes: Axes, fill: str, cells: Sequence[tuple[float, float, float, float]], lw: float = 0
) -> None:
    """Draw rectangles (left, low, right, high) as one path, which limits the file size; `lw`: line width of edges."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    left, low, right, high = np.array(cells).reshape(-1, 4).T
    corners = np.array([[left, low], [right, low], [right, high], [left, high]]).transpose(2, 0, 1)
    # Rectangles without edge lines are not snapped to pixels, because snapping would widen or hide short intervals.
    path, snap = Path.make_compound_path_from_polys(corners), None if lw else False
    patch = PathPatch(path, facecolor=fill, edgecolor="white", lw=lw, snap=snap)
    patch.set_in_layout(False)
    axes.add_artist(patch)  # `add_patch` would also compute data limits, which takes longer than drawing.


def _draw_merged(axes: Axes, rows: TimedRows, total: float, columns: int) -> None:
    """Draw each stage's row as `columns` equal intervals, coloured by the shares of forward, backward and idle time."""
    import numpy as np
    from matplotlib.colors import to_rgb

    fills = (ACTION_COLOURS[FORWARD], ACTION_COLOURS[BACKWARD], GRID)
    forward, backward, idle = (np.array(to_rgb(fill)) for fill in fills)
    shares = np.array(
        [busy_shares(row, total, columns) for row in rows]
    )  # shape [stage, column, 2]: shares of forward and backward time
    colours = shares[..., :1] * forward + shares[..., 1:] * backward
    colours += (1 - shares.sum(axis=2, keepdims=True)).clip(0) * idle
    extent = (0, total, len(rows) - 0.5, -0.5)
    axes.imshow(colours.clip(0, 1), extent=extent, aspect="auto", interpolation="none")
    axes.tick_params(axis="y", length=0)


def _count_chunks(rows: TimedRows) -> int:
    return 1 + max(slot.action.chunk for slot in rows[0])


def _draw_legend(figure: Figure, chunks: int) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    shown = range(0, chunks, ceil(chunks / 8))
    by_chunk = f" (from left: chunks 0 to {chunks - 1})" if chunks > 1 else ""
    signs: list[Any] = [
        tuple(Patch(facecolor=action_colours(kind, chunk, chunks)[1]) for chunk in shown)
        for kind in (FORWARD, BACKWARD)
    ]
    names = [f"forward{by_chunk}", f"backward{by_chunk}", "idle"]
    joined = {tuple: HandlerTuple(ndivide=None, pad=0)}
    handles = [*signs, Patch(facecolor=GRID)]
    figure.legend(handles, names, loc="outside upper right", ncols=3, handler_map=joined)


STAGES, MICRO_BATCHES = 4, 8
"""Numbers of stages and of micro-batches in the figure of pipeline schedules, as in 2104.04473, figures 3 and 4."""
SCHEDULES = (("gpipe", "GPipe", 1), ("1f1b", "1F1B with flush", 1), ("interleaved", "Interleaved 1F1B", 2))
TWIN_ROWS = {
    "gpipe": "meg2-bubble/GPipe, p = 2, m = 4: idle over compute time",
    "1f1b": "meg2-bubble/1F1B, p = 2, m = 4: idle over compute time",
    "interleaved": "meg2-bubble/interleaved, p = 2, m = 4, v = 2: idle over compute time",
}
PAPER_SCHEDULES = Drawing(
    "schedules",
    "Pipeline schedules and their idle time",
    f"{STAGES} stages, {MICRO_BATCHES} micro-batches, as in figures 3 and 4 of the Megatron-LM paper of 2021; counted "
    "on the schedule that the native engine executes. Forward is blue, backward orange; numbers are micro-batches; "
    "paler cells are a stage's second chunk. Measured twins: two stages. Claim: meg2-bubble. More: `repro schedule`.",
    missing="repro run suites/smoke.toml --only 'bubble-*'",
)


def draw_schedules(view: View) -> Drawing:
    """Draw GPipe, 1F1B and interleaved 1F1B with their computed bubbles, and bubbles measured on scaled-down models."""
    figure, grid = make_axes(5.6, len(SCHEDULES), 1, sharex=True)
    records: dict[str, None] = {}
    missing, longest = False, 0.0
    for axes, (name, title, chunks) in zip(grid, SCHEDULES, strict=True):
        schedule = build_schedule(name, STAGES, MICRO_BATCHES, chunks)
        rows = timeline(schedule)
        end = float(rows[0][-1].stop)
        draw_actions(axes, rows, (0.0, end), (72 * 8.5, 18))
        longest = max(longest, end)
        row = view.row(TWIN_ROWS[name])
        measured = next((f for f in row.findings if f.kind == "measured"), None)
        twin = "twin not measured"
        if measured is not None and isinstance(measured.value, int | float):
            sizes = row.row.label.partition(": ")[0].partition(", ")[2]
            twin = f"twin with {sizes}: measured idle time {measured.text} %"
            twin += f", formula {units.number(float(measured.expected or 0))} %"
            records |= dict.fromkeys(measured.experiments)
        missing = missing or twin == "twin not measured"
        most = max(in_flight(actions) for actions in schedule)
        idle = float(bubble_ratio(schedule))
        half = f", each for 1/{chunks} of a stage" if chunks > 1 else ""
        axes.set_title(
            f"{title}: idle for {units.percent(idle)} of the compute time (counted), stores activations of at most "
            f"{most} micro-batches{half}\n{twin}",
            fontsize=8.5,
            fontweight="normal",
        )
        axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
    grid[-1].set(xlim=(0, longest), xlabel="time, in forward passes of a stage (backward takes two)")
    return PAPER_SCHEDULES.drawn(figure, PAPER_SCHEDULES.caption, records, missing=missing)
