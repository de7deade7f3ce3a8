"""Which texts of a figure overlap each other or leave the picture, as its renderer places them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from repro.report.figures.style import settle

SLACK = 1.0
"""Dots by which boxes may touch: they hold the space around the letters too."""


def troubles(figure: Figure) -> list[str]:
    """One line for every pair of texts that overlap and every text that is cut; empty where all can be read."""
    settle(figure)
    figure.draw_without_rendering()
    boxes = [(text.get_text().replace("\n", " / "), text.get_window_extent()) for text in _drawn(figure)]
    whole = figure.bbox
    found = [
        f"{words!r} leaves the picture"
        for words, box in boxes
        if box.x0 < whole.x0 - SLACK
        or box.x1 > whole.x1 + SLACK
        or box.y0 < whole.y0 - SLACK
        or box.y1 > whole.y1 + SLACK
    ]
    for (one, first), (other, second) in combinations(boxes, 2):
        common = Bbox.intersection(first, second)
        if common is not None and common.width > SLACK and common.height > SLACK:
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
