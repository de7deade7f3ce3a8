"""Seconds of collectives that `repro calibrate` has measured: between its payloads, and for groups of other sizes."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import log2
from typing import NamedTuple

from repro.config.links import Collective


class GroupSpan(NamedTuple):
    """How a group lies on the ranks."""

    ranks: int
    per_node: int
    """Most members on one node."""
    stride: int
    """Ranks from one member to the next."""


def seconds(measured: Collective, all_ranks: int, span: GroupSpan, payload: float) -> float:
    """Of `payload` bytes in groups like `span`; `all_ranks`: how many the file was measured with."""
    known = nearest(measured, all_ranks, span)
    return scaled(known, known.ranks or all_ranks, span.ranks, payload)


def nearest(measured: Collective, all_ranks: int, span: GroupSpan) -> Collective:
    """The measured groups that are most like `span`: by how many members they have and how many of these share
    a node, then by how far apart they are."""

    def distance(known: Collective) -> tuple[float, float]:
        ranks = known.ranks or all_ranks
        size, shared = log2(ranks / span.ranks), log2((known.per_node or ranks) / span.per_node)
        return abs(size) + abs(shared), abs(log2(known.stride / span.stride))

    return min((measured, *measured.groups), key=distance)


def scaled(measured: Collective, whole: int, ranks: int, payload: float) -> float:
    """What was measured with `whole` ranks, for `ranks` of them.

    A ring's step carries payload / ranks, and there are ranks - 1 of them (or twice as many).
    """
    if whole < 2 or ranks == whole:
        return interpolate(measured, payload)
    return interpolate(measured, payload * whole / ranks) * (ranks - 1) / (whole - 1)


def interpolate(measured: Collective, payload: float) -> float:
    """Seconds of `payload` bytes between measured points.

    A point that took less than a smaller one is noise and counts as much as that.  Below the first point time
    does not fall, above the last one bandwidth does not rise.
    """
    sizes = [size for size, _ in measured.points]
    times = list(accumulate((seconds for _, seconds in measured.points), max))
    if payload >= sizes[-1]:
        return times[-1] * payload / sizes[-1]
    at = bisect_left(sizes, payload)
    if at == 0:
        return times[0]
    part = (payload - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return times[at - 1] + part * (times[at] - times[at - 1])
