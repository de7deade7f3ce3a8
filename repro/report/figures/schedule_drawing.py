"""A pipeline schedule as a picture: a row for each stage, time to the right; `repro schedule` and the report draw it.

Every action is a cell where cells are wide enough to see.  A larger schedule is shown whole, as the share of its time
that each stage spends in forward and backward, above its beginning and its end with every cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from repro.parallel.pipeline.schedule import BACKWARD, FORWARD, TimedAction, in_flight
from repro.report.figures.style import GRID, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 13.0
"""Inches of a picture of its own."""
THINNEST = 2.5
"""Points of the shortest action below which cells are merged."""
PART = 1.2
"""Least points of one part of a merged row."""
SMALLEST, LARGEST = 4.5, 8.5
"""Points of the numbers in cells; where only smaller ones fit there are none."""
Rows = Sequence[Sequence[TimedAction]]
"""When each stage runs what, as `parallel.pipeline.schedule.timeline` returns it."""

ONE = {FORWARD: "#0072b2", BACKWARD: "#e69f00"}
RANGE = {FORWARD: ("#00568c", "#9bd0f0"), BACKWARD: ("#d07f00", "#fbe3a6")}
"""From the first chunk to the last one: blue forward and orange backward (Okabe and Ito)."""


def paint(kind: str, chunk: int = 0, chunks: int = 1) -> tuple[str, str]:
    """(colour of text, colour of the cell) of an action, as `#rrggbb`."""
    fill = ONE[kind]
    if chunks > 1:
        first, last = (_channels(colour) for colour in RANGE[kind])
        mixed = (a + (b - a) * chunk / (chunks - 1) for a, b in zip(first, last, strict=True))
        fill = "#" + "".join(f"{round(channel):02x}" for channel in mixed)
    # Relative luminance (WCAG 2): black text reads better than white above about 0.18.
    linear = [
        c / 12.92 if (c := v / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for v in _channels(fill)
    ]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return ("#000000" if light > 0.18 else "#ffffff"), fill


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def busy_shares(row: Sequence[TimedAction], total: float, columns: int) -> list[tuple[float, float]]:
    """For each of `columns` equal parts of the step the shares in which a stage runs F and B."""
    scale = columns / total
    forward, backward = [0.0] * columns, [0.0] * columns
    for action, start, stop in row:
        first, last = float(start) * scale, float(stop) * scale
        shares = forward if action.kind == FORWARD else backward
        for column in range(int(first), min(columns, ceil(last))):
            shares[column] += max(0.0, min(last, column + 1) - max(first, column))
    return list(zip(forward, backward, strict=True))


def picture(rows: Rows, title: str, facts: str) -> Figure:
    """The whole schedule under its `title`; `facts`: a line about it."""
    stages, total = len(rows), float(max(row[-1].stop for row in rows))
    times = {slot.action.kind: float(slot.stop - slot.start) for slot in rows[0]}
    room = 72 * (WIDTH - 1)
    windows, titles = [(0.0, total)], [facts]
    heights = [min(0.42, max(0.16, 6 / stages))]
    span = min(times.values()) * room / THINNEST
    merged = span < total
    if merged:
        span = min(span, (stages + 3) * sum(times.values()) * _chunks(rows), total / 2)
        span = float(int(span)) if span >= 10 else span
        windows += [(0.0, span), (total - span, total)]
        heights = [min(0.25, max(0.045, 2.6 / stages))] + 2 * [min(0.32, max(0.1, 4.5 / stages))]
        titles[0] += (
            "\nThe whole step: in every part the colours of what the stage does, mixed by share of time"
        )
        titles += [f"Every action of the {end} {span:,.6g} units of time" for end in ("first", "last")]

    tall = [stages * height for height in heights]
    size = 1.1 + sum(tall) + 0.7 * len(tall)
    figure, grid = canvas(size, len(tall), width=WIDTH, height_ratios=tall, squeeze=False)
    for axes, window, height, words in zip(grid[:, 0], windows, heights, titles, strict=True):
        if merged and axes is grid[0, 0]:
            _mixed(axes, rows, total, round(min(room / PART, total / sum(times.values()))))
        else:
            draw(axes, rows, window, (room, 72 * height))
        every = ceil(0.17 / height)
        axes.set_yticks(range(0, stages, every), [f"stage {stage}" for stage in range(0, stages, every)])
        axes.set_title(words, fontweight="normal")
        beside = axes.secondary_yaxis("right")
        beside.set_yticks(range(0, stages, every), [str(_in_flight(row)) for row in rows[::every]])
        beside.set_ylabel("in flight")
        beside.tick_params(length=0)
        beside.spines["right"].set_visible(False)
    numbers = "; numbers are micro-batches" if grid[-1, 0].texts else ""
    grid[-1, 0].set_xlabel(f"time{numbers}")
    figure.suptitle(title, x=0.005, ha="left", fontsize=13, fontweight="bold")
    _legend(figure, _chunks(rows))
    return figure


def draw(axes: Axes, rows: Rows, window: tuple[float, float], points: tuple[float, float]) -> None:
    """Every action between two times, with its micro-batch where the number fits.

    `points`: about the width of the axes and the height of a row; one path a colour keeps large files small.
    """
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    first, last = window
    chunks, scale = _chunks(rows), points[0] / (last - first)
    digits = len(str(max(slot.action.micro_batch for slot in rows[0])))
    idle, corners = [(first, last - first)], defaultdict(list)
    for stage, row in enumerate(rows):
        axes.broken_barh(idle, (stage - 0.42, 0.84), facecolors=GRID, lw=0)
        for action, start, stop in row:
            left, right = max(first, float(start)), min(last, float(stop))
            if left >= right:
                continue
            ink, fill = paint(action.kind, action.chunk, chunks)
            low, high = stage - 0.42, stage + 0.42
            corners[fill].append([(left, low), (right, low), (right, high), (left, high), (left, low)])
            size = min(LARGEST, 0.6 * points[1], ((right - left) * scale - 2) / (0.62 * digits))
            if size >= SMALLEST:
                look: dict[str, Any] = {
                    "ha": "center",
                    "va": "center",
                    "color": ink,
                    "fontsize": size,
                    "in_layout": False,
                }
                axes.text((left + right) / 2, stage, str(action.micro_batch), **look)
    for fill, found in corners.items():
        path = Path.make_compound_path_from_polys(np.array(found)[:, :4])
        patch = PathPatch(path, facecolor=fill, edgecolor="white", lw=min(0.7, 0.2 * scale))
        patch.set_in_layout(False)
        axes.add_artist(patch)  # the limits are known, and finding them takes longer than all the rest
    axes.set_xlim(first, last)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _mixed(axes: Axes, rows: Rows, total: float, columns: int) -> None:
    """Each stage's row in `columns` parts, each in the colours of what it does in that time, by share."""
    import numpy as np
    from matplotlib.colors import to_rgb

    forward, backward, idle = (np.array(to_rgb(c)) for c in (ONE[FORWARD], ONE[BACKWARD], GRID))
    shares = np.array([busy_shares(row, total, columns) for row in rows])  # [stage, column, F and B]
    colours = shares[..., :1] * forward + shares[..., 1:] * backward
    colours += (1 - shares.sum(axis=2, keepdims=True)).clip(0) * idle
    extent = (0, total, len(rows) - 0.5, -0.5)
    axes.imshow(colours.clip(0, 1), extent=extent, aspect="auto", interpolation="none")
    axes.tick_params(axis="y", length=0)


def _in_flight(row: Sequence[TimedAction]) -> int:
    return in_flight([slot.action for slot in row])


def _chunks(rows: Rows) -> int:
    return 1 + max(slot.action.chunk for slot in rows[0])


def _legend(figure: Figure, chunks: int) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    shown = range(0, chunks, ceil(chunks / 8))
    by_chunk = f", by chunk 0 to {chunks - 1}" if chunks > 1 else ""
    signs: list[Any] = [
        tuple(Patch(facecolor=paint(kind, chunk, chunks)[1]) for chunk in shown)
        for kind in (FORWARD, BACKWARD)
    ]
    names = [f"forward{by_chunk}", f"backward{by_chunk}", "idle"]
    figure.legend(
        [*signs, Patch(facecolor=GRID)],
        names,
        loc="outside upper right",
        ncols=3,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
