"""Happens-before order on a device with several streams, as vector clocks of the host and of each stream.

A stream runs its operations in the order in which the host launches them, and each operation starts after its launch.
Operations of different streams may run in any order, unless a wait orders them.
"""

from __future__ import annotations

from typing import NamedTuple

HOST = "host"
Moment = dict[str, int]
"""Vector clock: for each actor, the number of its last operation that has certainly ended."""


class Point(NamedTuple):
    """Operation of an actor (the host or a stream)."""

    actor: str
    number: int


class Order:
    """Vector clocks of all actors. An actor exists from the first use of its name."""

    def __init__(self) -> None:
        self._clocks: dict[str, Moment] = {HOST: {HOST: 0}}

    def _clock(self, actor: str) -> Moment:
        return self._clocks.setdefault(actor, {actor: 0})

    def run(self, actor: str) -> Point:
        """Add an operation of the actor after its earlier operations and waits; the host launches those of streams."""
        clock = self._clock(actor)
        if actor != HOST:
            self._clocks[HOST][HOST] += 1
            _join(clock, self._clocks[HOST])
        clock[actor] += 1
        return Point(actor, clock[actor])

    def record(self, actor: str) -> Moment:
        """Return the moment after all launched operations and waits of the actor, as a CUDA event."""
        self.run(actor)
        return dict(self._clock(actor))

    def wait(self, actor: str, moment: Moment) -> None:
        """Order later operations of the actor after `moment`."""
        _join(self._clock(actor), moment)

    def has_ended(self, point: Point, actor: str) -> bool:
        """Return whether the operation `point` certainly ends before the next operation of the actor."""
        host = 0 if actor == HOST else self._clocks[HOST].get(point.actor, 0)
        return point.number <= max(self._clock(actor).get(point.actor, 0), host)


def _join(clock: Moment, other: Moment) -> None:
    for actor, number in other.items():
        clock[actor] = max(clock.get(actor, 0), number)
