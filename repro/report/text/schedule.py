"""Output of `repro schedule`: a pipeline schedule drawn with characters, as SVG or as JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import groupby
from math import ceil, floor
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from repro.config.errors import require
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD, Action
from repro.report.figures.schedules import action_colours, busy_shares
from repro.report.text.schedule_plan import (
    TimedSchedule,
    format_number,
    format_share,
    make_schedule,
    schedule_document,
    schedule_facts,
)
from repro.util import files
from repro.util.console import PAGE_COLUMNS, new_facts_table, stdout


def print_schedule(
    stages: int,
    micro_batches: int,
    chunks: int,
    name: str,
    forward: str,
    backward: str,
    json: bool,
    svg: bool,
    out: Path | None,
    details: bool,
) -> int:
    """Print one pipeline schedule as text, SVG or JSON; return 0. Raises `ConfigError` for an invalid option."""
    svg = svg or out is not None
    require(not (json and svg), "--json", True, says="cannot be combined with --svg or --out")
    plan = make_schedule(name, stages, micro_batches, chunks, forward, backward)
    if json:
        document = json_module.dumps(schedule_document(plan), separators=(",", ":"))
        sys.stdout.write(document + "\n")
    elif svg:
        if out is None:
            sys.stdout.write(_svg(plan))
        else:
            files.write_file(out, _svg(plan))
            print(out)
    else:
        print_drawing(plan, None if details else SCREEN_LINES)
    return 0


def _svg(plan: TimedSchedule) -> str:
    """Return the drawing of a schedule as an SVG document."""
    from repro.report.figures import schedules, style

    caption = "No bubble"
    if plan.bubble:
        ideal, idle = format_number(plan.ideal), format_number(plan.total - plan.ideal)
        caption = f"Bubble {format_share(plan.bubble)} of the ideal time {ideal}, by {plan.formula}; idle time {idle}"
    forward, backward = format_number(plan.forward), format_number(plan.backward)
    caption += f"; a micro-batch on a stage takes {forward} units of time forward, {backward} backward"
    with style.figure_style():
        figure = schedules.draw_picture(plan.slots, plan.title, caption)
        return style.to_svg(style.Drawing("schedule", plan.title, caption, (), figure=figure)) + "\n"


MAX_DRAWN_LINES, SCREEN_LINES = 60, 11
"""Maximum numbers of text lines of a drawn pipeline schedule, with and without `--details`."""
IDLE_CELL, MIXED_CELL = "·", "▒"
Cell = tuple[str, str]
"""One character of a schedule drawn as text, and its style for the package rich."""


def print_drawing(plan: TimedSchedule, most: int | None) -> None:
    """Print the properties of a pipeline schedule, then its drawing; `most`: maximum number of drawn lines."""
    console = stdout(PAGE_COLUMNS)
    rows = new_facts_table()
    for name, sentence in schedule_facts(plan):
        rows.add_row(name, Text(sentence, style="bold" if name == "bubble" else ""))
    console.print(rows)
    console.print()
    for line in draw_schedule(plan, console, most):
        console.print(line, no_wrap=True, crop=False, overflow="ignore")


def draw_schedule(plan: TimedSchedule, console: Console, most: int | None = None) -> list[Text]:
    """Return the drawing of a schedule as lines of text, one row per stage and time from left to right.

    `most`: maximum number of lines without the legend; stages in the middle are omitted. None: draw all stages.
    """
    colour = console.color_system is not None
    live = plan.in_flight
    left, right = len("stage "), len(" in flight")
    width = max(20, console.width - left - right)
    per_action = _columns_per_action(plan, width, colour, most or MAX_DRAWN_LINES)
    if per_action:
        columns_per_time = per_action / _shortest(plan)
        columns = ceil(plan.total * columns_per_time)
        gap = per_action > _widest(plan, colour)
        rows = [_actions(plan, stage, columns, columns_per_time, colour, gap) for stage in range(plan.stages)]
    else:
        # Each text column spans one forward and one backward pass or more; narrower columns would alternate.
        pair = (plan.forward + plan.backward) / plan.chunks
        columns = min(width, floor(plan.total / pair))
        columns_per_time = columns / plan.total
        rows = [_shares(plan, stage, columns, colour) for stage in range(plan.stages)]

    lines = []
    for first in range(0, columns, width):
        last = min(first + width, columns)
        axis = _axis(first, last, columns_per_time)
        lines.append(Text(f"{'stage':<{left}}{axis} in flight", style="dim"))
        hidden = range(most // 2, plan.stages - most // 2 + 1) if most and plan.stages >= most else range(0)
        for stage, row in enumerate(rows):
            if stage in hidden:
                lines += [Text(f"  ... {len(hidden)} stages: --details", style="dim")] * (stage == hidden[0])
                continue
            line = Text(f"{stage:>{left - 1}} ", style="")
            for style, cells in groupby(row[first:last], key=lambda cell: cell[1]):
                line.append("".join(character for character, _ in cells), style=style)
            line.append(f"{live[stage]:>{right}}", style="dim")
            lines.append(line)
    legend = _legend(plan, per_action, colour)
    lines.append(legend if len(legend) <= console.width else legend[left:])
    for note in _notes(plan, per_action, colour, columns > width):
        lines += [Text(" " * left + part, style="dim") for part in wrap(note, console.width - left)]
    return lines


def _shortest(plan: TimedSchedule) -> Fraction:
    return min(plan.forward, plan.backward) / plan.chunks


def _label(action: Action, colour: bool) -> str:
    return str(action.micro_batch) if colour else str(action)


def _widest(plan: TimedSchedule, colour: bool) -> int:
    return len(_label(Action(FORWARD, plan.micro_batches - 1, plan.chunks - 1), colour))


def _columns_per_action(plan: TimedSchedule, width: int, colour: bool, most: int) -> int:
    """Return the width of the shortest drawn pass in characters; 0 if the terminal is too narrow to draw every pass.

    Labels on one line of time are preferred, then labels on several lines, then one line without labels.
    """
    label = _widest(plan, colour)
    least = label + (colour and label > 1)  # Without a gap, labels 10 and 11 would read as 1011.

    def blocks(columns: int) -> int:
        return ceil(plan.total * columns / _shortest(plan) / width)

    for columns in range(label + 1, least - 1, -1):
        if blocks(columns) == 1:
            return columns
    for columns in range(label + 1, least - 1, -1):
        if blocks(columns) * (plan.stages + 1) <= most:
            return columns
    return next((columns for columns in range(least - 1, 0, -1) if blocks(columns) == 1), 0)


def _actions(
    plan: TimedSchedule, stage: int, columns: int, scale: Fraction, colour: bool, gap: bool
) -> list[Cell]:
    """Return a stage's characters, `scale` of them per unit of time; with `gap`, the last one of each pass is blank."""
    row: list[Cell] = [(IDLE_CELL, "dim")] * columns
    for action, start, stop in plan.slots[stage]:
        first, last = (floor(time * scale + Fraction(1, 2)) for time in (start, stop))
        label = _label(action, colour)
        if len(label) > last - first:
            label = " " if colour else action.kind
        body = label.ljust(last - first - gap, " " if colour else "─")
        style = _style(action, plan.chunks) if colour else ""
        row[first:last] = [(character, style) for character in body] + [(" ", "")] * gap
    return row


def _shares(plan: TimedSchedule, stage: int, columns: int, colour: bool) -> list[Cell]:
    """Return a stage's row of characters: the predominant one of forward, backward and idle in equal intervals."""
    shares = busy_shares(plan.slots[stage], float(plan.total), columns)
    row: list[Cell] = []
    for forward, backward in shares:
        busy = forward + backward
        if busy < 0.5:
            row.append((IDLE_CELL, "dim"))
        elif min(forward, backward) > 0.1 * busy:
            row.append((MIXED_CELL, _mixed_style() if colour else ""))
        else:
            kind = Action(FORWARD if forward > backward else BACKWARD, 0)
            row.append((" ", _style(kind, 1)) if colour else (kind.kind, ""))
    return row


def _style(action: Action, chunks: int) -> str:
    ink, fill = action_colours(action.kind, action.chunk, chunks)
    return f"{ink} on {fill}"


def _mixed_style() -> str:
    return f"{action_colours(FORWARD)[1]} on {action_colours(BACKWARD)[1]}"


def _axis(first: int, last: int, scale: Fraction) -> str:
    """Return the time axis as text above columns `first` to `last` of a drawing; `scale`: columns per unit of time."""
    step = Fraction(1)
    for step in (Fraction(factor) * 10**power for power in range(7) for factor in (1, 2, 5)):
        if step * scale >= 6:
            break
    line = [" "] * (last - first)
    time = ceil(first / scale / step) * step
    while (column := floor(time * scale + Fraction(1, 2)) - first) < last - first:
        words = format_number(time)
        if column + len(words) <= last - first:
            line[column : column + len(words)] = words
        time += step
    return "".join(line)


def _legend(plan: TimedSchedule, per_action: int, colour: bool) -> Text:
    chunks = plan.chunks if per_action else 1
    line = Text(" " * len("stage "))
    for kind, word in ((FORWARD, "forward"), (BACKWARD, "backward")):
        for chunk in range(chunks) if colour else ():
            line.append(f"{chunk:^3}" if chunks > 1 else "   ", _style(Action(kind, 0, chunk), chunks))
        line.append(f" {word}{' by chunk' * (chunks > 1)}  " if colour else f"{kind} {word}  ")
    if not per_action:
        line.append(MIXED_CELL * 2, _mixed_style() if colour else "")
        line.append(" both  ")
    line.append(f"{IDLE_CELL} idle")
    return line


def _notes(plan: TimedSchedule, per_action: int, colour: bool, broken: bool) -> Iterator[str]:
    if not per_action:
        yield "A column covers several actions and shows the predominant one; --svg draws all."
        return
    if plan.chunks > 1 and not colour:
        yield "F3.1 is the forward pass of micro-batch 3 in chunk 1."
    if per_action < _widest(plan, colour):
        yield "Passes that are too narrow for their micro-batch number have no number."
    if broken:
        yield "The time axis continues in the next block of rows."
