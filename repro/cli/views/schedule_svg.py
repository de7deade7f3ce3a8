"""A pipeline schedule as one SVG picture: rows of stages, time to the right, readable on light and dark.

Every action is a cell where cells are wide enough to see.  A larger schedule is shown whole, with alternating
cells merged, above its beginning and its end with every cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from xml.sax.saxutils import escape

from repro.cli.views.schedule_plan import Plan, number, share
from repro.cli.views.schedule_text import busy_shares
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD, Slot
from repro.report.figures.schedule_colours import paint

WIDTH, LEFT, RIGHT, HEAD = 1200, 76, 84, 104
PLOT = WIDTH - LEFT - RIGHT
THINNEST = 3.0
"""Pixels of the shortest action below which cells are merged."""
BUCKET = 1.5
"""Least pixels of one part of a merged row."""
MOST_TITLES = 4000
"""Cells that still get a tooltip of their own."""

STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans","DejaVu Sans",sans-serif;fill:#1d2530}
.page{fill:#fff}.muted{fill:#5d6875}.idle{fill:#e9edf1}.hatch{stroke:#c3ccd4;stroke-width:1}
.axis{stroke:#9aa3ad;stroke-width:1;fill:none}.mark{stroke:#5d6875;stroke-width:1.2;fill:none}
.m{text-anchor:middle}.e{text-anchor:end}.h{font-size:20px;font-weight:600}.s{font-size:14px}.t{font-size:12px}
@media (prefers-color-scheme:dark){text{fill:#e4e9ee}.page{fill:#14191f}.muted{fill:#9fabb7}.idle{fill:#232b34}
.hatch{stroke:#3a4550}.axis{stroke:#6b7783}.mark{stroke:#9fabb7}}
"""


@dataclass(frozen=True)
class Panel:
    """One drawing of all stages between two times; sizes in pixels."""

    title: str
    top: float
    """Where its first row starts."""
    row: float
    """Height of a row with its gap."""
    first: float
    last: float
    merged: bool = False

    @property
    def scale(self) -> float:
        """Pixels per unit of time."""
        return PLOT / (self.last - self.first)

    def x(self, time: float) -> float:
        """Where a time is, kept inside the panel."""
        return LEFT + (min(max(time, self.first), self.last) - self.first) * self.scale


def draw(plan: Plan) -> str:
    """The picture as an SVG document with a viewBox of 1200 pixels' width."""
    panels = _panels(plan)
    height = round(panels[-1].top + plan.stages * panels[-1].row + 58)
    body = [line for panel in panels for line in _panel(plan, panel)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(plan.title)}; bubble {share(plan.bubble)}</title>",
            f"<style>{STYLE}{_cell_style(plan)}</style>",
            _patterns(plan),
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *_head(plan, panels),
            *body,
            "</svg>\n",
        ]
    )


def _panels(plan: Plan) -> list[Panel]:
    total = float(plan.total)
    shortest = float(min(plan.forward, plan.backward)) / plan.chunks
    if shortest * PLOT / total >= THINNEST:
        row = min(38.0, max(14.0, 560 / plan.stages))
        return [Panel("", HEAD + 32, row, 0, total)]
    depth = float((plan.stages + 3) * (plan.forward + plan.backward))
    span = min(depth, shortest * PLOT / THINNEST, total / 2)
    span = float(int(span)) if span >= 10 else span
    row = min(30.0, max(9.0, 420 / plan.stages))
    thin = float(min(24, max(4, 240 // plan.stages)))  # whole pixels, or rows would show seams
    units = f"{number(round(span, 2))} units of time"
    top, step = HEAD + 64, plan.stages * row + 84
    second = top + plan.stages * thin + 84
    return [
        Panel("The whole step, merged; fainter where the stage also waits", top, thin, 0, total, merged=True),
        Panel(f"Every action of the first {units}", second, row, 0, span),
        Panel(f"Every action of the last {units}", second + step, row, total - span, total),
    ]


def _head(plan: Plan, panels: list[Panel]) -> Iterator[str]:
    yield f'<text class="h" x="{LEFT}" y="34">{escape(plan.title)}</text>'
    bubble = f"Bubble {share(plan.bubble)} of the ideal time, {plan.formula}"
    if not plan.bubble:
        bubble = "No bubble"
    yield f'<text class="s" x="{LEFT}" y="58">{bubble}</text>'
    x: float = LEFT
    for kind, word in ((FORWARD, "forward"), (BACKWARD, "backward")):
        shown = _legend_chunks(plan)
        for chunk in shown:
            yield f'<rect class="{kind}{chunk}" x="{x:g}" y="74" width="20" height="16"/>'
            if len(shown) > 1:
                ink = f'class="m i{kind}{chunk}" font-size="11"'
                yield f'<text {ink} x="{x + 10:g}" y="86">{chunk}</text>'
            x += 21
        words = f"{word}, by chunk" if plan.chunks > 1 else word
        yield f'<text class="t" x="{x + 5:g}" y="87">{words}</text>'
        x += 5 + 6.6 * len(words) + 22
    if panels[0].merged:
        yield f'<rect fill="url(#turn)" x="{x:g}" y="74" width="40" height="16"/>'
        yield f'<text class="t" x="{x + 46:g}" y="87">in turn</text>'
        x += 46 + 62
    yield f'<rect class="idle" x="{x:g}" y="74" width="20" height="16"/>'
    yield f'<rect fill="url(#hatch)" x="{x:g}" y="74" width="20" height="16"/>'
    yield f'<text class="t" x="{x + 26:g}" y="87">idle</text>'


def _legend_chunks(plan: Plan) -> range:
    return range(0, plan.chunks, ceil(plan.chunks / 8))


def _panel(plan: Plan, panel: Panel) -> Iterator[str]:
    """The rows of all stages, their labels and the axis."""
    if panel.title:
        y = panel.top - (38 if panel.merged else 12)
        yield f'<text class="s" x="{LEFT}" y="{y:g}">{panel.title}</text>'
    yield f'<text class="t muted e" x="{LEFT - 8}" y="{panel.top - 8:g}">stage</text>'
    yield f'<text class="t muted" x="{LEFT + PLOT + 10}" y="{panel.top - 8:g}">in flight</text>'
    every = ceil(13 / panel.row)
    live = plan.in_flight
    bottom = panel.top + plan.stages * panel.row
    gap = 0.0 if panel.merged and panel.row < 9 else min(3.0, panel.row * 0.15)
    for stage in range(plan.stages):
        y = panel.top + stage * panel.row
        for fill in ('class="idle"', 'fill="url(#hatch)"'):
            yield f'<rect {fill} x="{LEFT}" y="{y:.4g}" width="{PLOT}" height="{panel.row - gap:.4g}"/>'
        if stage % every == 0:
            middle = y + (panel.row - gap) / 2 + 4
            yield f'<text class="t e" x="{LEFT - 8}" y="{middle:.4g}">{stage}</text>'
            yield f'<text class="t muted" x="{LEFT + PLOT + 10}" y="{middle:.4g}">{live[stage]}</text>'
    if panel.merged:
        yield from _merged(plan, panel, gap)
    else:
        yield from _cells(plan, panel, gap)
    yield from _axis(plan, panel, bottom)
    if panel.last - panel.first == float(plan.total):
        yield from _lengths(plan, panel)


def _cells(plan: Plan, panel: Panel, gap: float) -> Iterator[str]:
    """Every action between the panel's times: a cell, and its micro-batch where the number fits."""
    paths: dict[str, list[str]] = defaultdict(list)
    texts = []
    height = panel.row - gap
    shown = [
        (stage, slot)
        for stage, row in enumerate(plan.slots)
        for slot in row
        if slot.stop > panel.first and slot.start < panel.last
    ]
    titles = len(shown) <= MOST_TITLES
    shortest = float(min(plan.forward, plan.backward)) / plan.chunks * panel.scale
    between = min(1.2, shortest * 0.15)
    sizes = _text_sizes(plan, panel)
    for stage, slot in shown:
        left, right = panel.x(float(slot.start)), panel.x(float(slot.stop))
        width, y = right - left - between, panel.top + stage * panel.row
        name = f"{slot.action.kind}{slot.action.chunk}"
        if titles:
            box = f'x="{left:.2f}" y="{y:.4g}" width="{width:.2f}" height="{height:.4g}"'
            yield f'<rect class="{name}" {box}><title>{_tooltip(plan, stage, slot)}</title></rect>'
        else:
            paths[name].append(f"M{left:.2f} {y:.4g}h{width:.2f}v{height:.4g}h-{width:.2f}z")
        words = str(slot.action.micro_batch)
        size = sizes[slot.action.kind]
        if 0.6 * size * len(words) <= width - 1 and size:
            x, base = left + width / 2, y + height / 2 + size * 0.36
            texts.append(
                f'<text class="m i{name}" x="{x:.1f}" y="{base:.1f}" font-size="{size:.1f}">{words}</text>'
            )
    for name, parts in paths.items():
        yield f'<path class="{name}" d="{"".join(parts)}"/>'
    yield '<g pointer-events="none">' + "".join(texts) + "</g>"


def _text_sizes(plan: Plan, panel: Panel) -> dict[str, float]:
    """Size of the numbers in cells of each kind, one for both kinds if possible; 0 where none would fit."""
    digits = len(str(plan.micro_batches - 1))
    sizes = {}
    for kind, time in ((FORWARD, plan.forward), (BACKWARD, plan.backward)):
        width = float(time) / plan.chunks * panel.scale
        sizes[kind] = min(13.0, panel.row * 0.6, (width - 3) / (0.6 * digits))
    least = min(sizes.values())
    return {kind: least if least >= 8 else size if size >= 7 else 0.0 for kind, size in sizes.items()}


def _tooltip(plan: Plan, stage: int, slot: Slot) -> str:
    word = "forward" if slot.action.kind == FORWARD else "backward"
    chunk = f", chunk {slot.action.chunk}" if plan.chunks > 1 else ""
    times = f"{number(slot.start)} to {number(slot.stop)}"
    return f"stage {stage}: {word} of micro-batch {slot.action.micro_batch}{chunk}, {times}"


def _merged(plan: Plan, panel: Panel, gap: float) -> Iterator[str]:
    """What each stage mostly does in every part of the step, fainter where it also waits."""
    pair = float(plan.forward + plan.backward) / plan.chunks  # in turn, every part has its forward
    columns = max(1, round(min(PLOT / BUCKET, float(plan.total) / pair)))
    paths: dict[tuple[str, int], list[str]] = defaultdict(list)
    for stage in range(plan.stages):
        y = panel.top + stage * panel.row
        kinds = [_mostly(*shares) for shares in busy_shares(plan, stage, columns)]
        column = 0
        for kind, run in groupby(kinds):
            length = sum(1 for _ in run)
            if kind[1]:
                x, width = LEFT + column * PLOT / columns, length * PLOT / columns
                height = panel.row - gap
                paths[kind].append(f"M{x:.2f} {y:.4g}h{width:.2f}v{height:.4g}h-{width:.2f}z")
            column += length
    for (fill, level), parts in paths.items():
        yield f'<path fill="{fill}" fill-opacity="{level / 4:g}" d="{"".join(parts)}"/>'


def _mostly(forward: float, backward: float) -> tuple[str, int]:
    """(fill, opacity in quarters) of a part of a row with these shares of F and B."""
    busy = forward + backward
    level = round(min(1.0, busy) * 4)
    if min(forward, backward) > 0.1 * busy:
        return "url(#turn)", level
    return paint(FORWARD if forward > backward else BACKWARD)[1], level


def _axis(plan: Plan, panel: Panel, bottom: float) -> Iterator[str]:
    """Times below the rows, at round numbers."""
    y = bottom + 4
    yield f'<path class="axis" d="M{LEFT} {y:.4g}H{LEFT + PLOT}"/>'
    step = next(s for p in range(-3, 9) for s in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if s * panel.scale >= 52)
    tick = ceil(panel.first / step)
    while tick * step <= panel.last * 1.0000001:
        x = panel.x(tick * step)
        yield f'<path class="axis" d="M{x:.1f} {y:.4g}v5"/>'
        words = number(round(tick * step, 3))
        yield f'<text class="t m" x="{x:.1f}" y="{y + 19:.4g}">{words}</text>'
        tick += 1
    words = f"time; a micro-batch takes {number(plan.forward)} forward and {number(plan.backward)} backward on a stage"
    if not panel.merged and any(_text_sizes(plan, panel).values()):
        words += "; numbers are micro-batches"
    if plan.chunks > 1:
        words += "; in flight are pairs of micro-batch and chunk"
    yield f'<text class="t muted" x="{LEFT}" y="{y + 38:.4g}">{words}</text>'


def _lengths(plan: Plan, panel: Panel) -> Iterator[str]:
    """Dimension lines above the rows: the stage's own time, and the bubble that is added to it."""
    y, middle, end = panel.top - 8, panel.x(float(plan.ideal)), LEFT + PLOT
    bubble = f"bubble {number(plan.total - plan.ideal)}"
    fits = end - middle > 7 * len(bubble) + 8
    words = f"ideal time {number(plan.ideal)}" + ("" if fits or not plan.bubble else f", {bubble}")
    for left, right, text in ((LEFT, middle, words), (middle, end, bubble if fits else "")):
        if right - left > 2:
            yield f'<path class="mark" d="M{left:.1f} {y:.4g}v-5v10v-5H{right:.1f}v-5v10"/>'
        yield f'<text class="t m" x="{(left + right) / 2:.1f}" y="{y - 6:.4g}">{text}</text>'


def _cell_style(plan: Plan) -> str:
    """Classes F0, B0, ... of cells and iF0, iB0, ... of the numbers in them."""
    rules = []
    for kind in (FORWARD, BACKWARD):
        for chunk in range(plan.chunks):
            ink, fill = paint(kind, chunk, plan.chunks)
            rules.append(f".{kind}{chunk}{{fill:{fill}}}.i{kind}{chunk}{{fill:{ink}}}")
    return "".join(rules)


def _patterns(plan: Plan) -> str:
    """Hatching of idle time, and stripes for forward and backward in turn, as wide as they are long."""
    forward = 6 * float(plan.forward / (plan.forward + plan.backward))
    return (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern>'
        '<pattern id="turn" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="{forward:.3g}" height="6" fill="{paint(FORWARD)[1]}"/>'
        f'<rect x="{forward:.3g}" width="{6 - forward:.3g}" height="6" fill="{paint(BACKWARD)[1]}"/>'
        "</pattern></defs>"
    )
