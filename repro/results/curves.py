"""How far apart loss curves are, and whether that is more than another order of sums makes of one.

Sums in another order are rounded otherwise, and a training amplifies that: after hundreds of steps no fixed tolerance
says what is too much.  Controls do: the same training with its sums in another order and nothing else changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

STRETCH = 50
"""Steps over which distances are taken together: a training amplifies the same rounding more and less as it goes."""
ROUNDING = 2.0**-24
"""Relative, of a loss in fp32: no distance under it can be told from none."""

Losses = Sequence[float | None]


def distances(losses: Losses, reference: Losses) -> list[float]:
    """|loss - reference| / |reference| of every step that has both; a loss that was NaN has none."""
    pairs = zip(losses, reference, strict=False)
    return [abs(loss - right) / abs(right) for loss, right in pairs if loss is not None and right]


def root_mean_square(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sqrt(sum(value * value for value in values) / len(values))


def strayed(losses: Losses, reference: Losses, controls: Sequence[Losses]) -> float:
    """Distance of a curve from `reference` over that of `controls`, root mean squares, in the worst stretch of steps.

    If nothing but rounding parts them, every stretch is a draw of Student's t with as many degrees of freedom as there
    are controls, or of something with thinner tails: rounding errors add up to a normal distribution, which what
    follows stretches alike, and its width is known from the controls alone.  All curves have as many steps.
    """
    mine, others = (
        distances(losses, reference),
        [distances(control, reference) for control in controls],
    )
    if not others or {len(curve) for curve in (losses, *controls, mine, *others)} != {len(reference)}:
        raise ValueError("needs controls, and a loss of every step of each")
    found = 0.0
    for start in range(0, len(reference), STRETCH):
        part = slice(start, start + STRETCH)
        explained = root_mean_square([distance for control in others for distance in control[part]])
        found = max(found, root_mean_square(mine[part]) / max(explained, ROUNDING))
    return found


def end(losses: Losses) -> float:
    """Mean loss of the last stretch.  Raises `ValueError` where one is missing."""
    last = [loss for loss in losses[-STRETCH:] if loss is not None]
    if len(last) < STRETCH:
        raise ValueError(f"needs a loss in each of the last {STRETCH} steps")
    return sum(last) / STRETCH
