"""Find texts of a figure that overlap each other or leave the picture, at the positions that the renderer computes."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from repro.report.figures.style import fix_layout

SLACK_PX = 1.0
"""Maximum overlap of two text boxes, in pixels; a box includes the space around its letters."""


def text_layout_errors(figure: Figure) -> list[str]:
    """Return one line for every pair of overlapping texts and every cut text; empty if all texts are readable."""
    fix_layout(figure)
    figure.draw_without_rendering()
    boxes = [
        (text.get_text().replace("\n", " / "), tuple(text.get_window_extent().extents.tolist()))
        for text in _visible_texts(figure)
    ]
    left, bottom, right, top = figure.bbox.extents
    found = [
        f"{words!r} leaves the picture"
        for words, (x0, y0, x1, y1) in boxes
        if x0 < left - SLACK_PX or x1 > right + SLACK_PX or y0 < bottom - SLACK_PX or y1 > top + SLACK_PX
    ]
    for (one, (x0, y0, x1, y1)), (other, (left, bottom, right, top)) in combinations(boxes, 2):
        if min(x1, right) - max(x0, left) > SLACK_PX and min(y1, top) - max(y0, bottom) > SLACK_PX:
            found.append(f"{one!r} overlaps {other!r}")
    return found


def _visible_texts(figure: Figure) -> list[Text]:
    hidden: set[Any] = set()
    for axes in figure.axes:
        if not axes.get_visible():
            hidden |= set(axes.findobj(Text))
            continue
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            tolerance = 1e-9 * (high - low)
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            visible_ticks = [tick for tick in ticks if low - tolerance <= tick.get_loc() <= high + tolerance]
            shown = {tick.label1 for tick in visible_ticks if tick.label1.get_visible()}
            shown |= {tick.label2 for tick in visible_ticks if tick.label2.get_visible()}
            if not axes.axison:
                shown = set()
                hidden.add(axis.label)
            hidden |= {text for text in axis.findobj(Text) if text is not axis.label and text not in shown}
    return [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_text().strip() and text.get_visible() and text not in hidden
    ]
