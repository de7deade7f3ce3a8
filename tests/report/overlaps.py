"""Which texts of a figure overlap each other or leave the picture, as its renderer places them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from repro.report.figures.style import fix_layout

SLACK = 1.0
"""Dots by which boxes may touch: they hold the space around the letters too."""


def troubles(figure: Figure) -> list[str]:
    """One line for every pair of texts that overlap and every text that is cut; empty where all can be read."""
    fix_layout(figure)
    figure.draw_without_rendering()
    boxes = [
        (text.get_text().replace("\n", " / "), tuple(text.get_window_extent().extents.tolist()))
        for text in _drawn(figure)
    ]
    left, bottom, right, top = figure.bbox.extents
    found = [
        f"{words!r} leaves the picture"
        for words, (x0, y0, x1, y1) in boxes
        if x0 < left - SLACK or x1 > right + SLACK or y0 < bottom - SLACK or y1 > top + SLACK
    ]
    for (one, (x0, y0, x1, y1)), (other, (left, bottom, right, top)) in combinations(boxes, 2):
        if min(x1, right) - max(x0, left) > SLACK and min(y1, top) - max(y0, bottom) > SLACK:
            found.append(f"{one!r} overlaps {other!r}")
    return found


def _drawn(figure: Figure) -> list[Text]:
    hidden: set[Any] = set()
    for axes in figure.axes:
        if not axes.get_visible():
            hidden |= set(axes.findobj(Text))
            continue
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            room = 1e-9 * (high - low)
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            kept = [tick for tick in ticks if low - room <= tick.get_loc() <= high + room]
            shown = {tick.label1 for tick in kept if tick.label1.get_visible()}
            shown |= {tick.label2 for tick in kept if tick.label2.get_visible()}
            if not axes.axison:
                shown = set()
                hidden.add(axis.label)
            hidden |= {text for text in axis.findobj(Text) if text is not axis.label and text not in shown}
    return [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_text().strip() and text.get_visible() and text not in hidden
    ]
