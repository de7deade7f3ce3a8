"""Colours of a schedule: blue forward and orange backward (Okabe and Ito), darker for earlier chunks."""

from __future__ import annotations

from repro.parallel.pipeline.schedule import BACKWARD, FORWARD

INK, PAPER = "#000000", "#ffffff"
ONE = {FORWARD: "#0072b2", BACKWARD: "#e69f00"}
RANGE = {FORWARD: ("#00568c", "#9bd0f0"), BACKWARD: ("#d07f00", "#fbe3a6")}
"""From the first chunk to the last one."""


def paint(kind: str, chunk: int = 0, chunks: int = 1) -> tuple[str, str]:
    """(colour of text, colour of the cell) of an action, as `#rrggbb`."""
    if chunks == 1:
        fill = ONE[kind]
    else:
        first, last = (_channels(colour) for colour in RANGE[kind])
        mixed = (a + (b - a) * chunk / (chunks - 1) for a, b in zip(first, last, strict=True))
        fill = "#" + "".join(f"{round(channel):02x}" for channel in mixed)
    return (INK if _luminance(fill) > 0.18 else PAPER), fill


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _luminance(colour: str) -> float:
    """Relative luminance (WCAG 2): black text reads better than white above about 0.18."""
    linear = [
        c / 12.92 if (c := v / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for v in _channels(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
