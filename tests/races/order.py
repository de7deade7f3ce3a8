"""What happens before what on a device of several streams: vector clocks of the host and of every stream.

A stream does what the host has given it in that order, and nothing that is given to it begins before the host has come
that far.  Everything else runs at any time, unless a wait lies between.
"""

from __future__ import annotations

from typing import NamedTuple

HOST = "host"
Moment = dict[str, int]
"""How far each actor has certainly come: of each the number of its last thing that is over."""


class Point(NamedTuple):
    """One thing that an actor (the host, or a stream) does."""

    actor: str
    number: int


class Order:
    """The clocks.  Actors are known by their names and begin when they are first named."""

    def __init__(self) -> None:
        self._clocks: dict[str, Moment] = {HOST: {HOST: 0}}

    def _clock(self, actor: str) -> Moment:
        return self._clocks.setdefault(actor, {actor: 0})

    def does(self, actor: str) -> Point:
        """The actor does one more thing, after all that it has done and waited for; a stream as the host tells it."""
        clock = self._clock(actor)
        if actor != HOST:
            self._clocks[HOST][HOST] += 1
            _join(clock, self._clocks[HOST])
        clock[actor] += 1
        return Point(actor, clock[actor])

    def reached(self, actor: str) -> Moment:
        """What an event recorded now says: all that the actor has been given, and what it waited for, is over."""
        self.does(actor)
        return dict(self._clock(actor))

    def waits(self, actor: str, moment: Moment) -> None:
        """What the actor does from now on begins when that moment has been reached."""
        _join(self._clock(actor), moment)

    def is_over(self, point: Point, actor: str) -> bool:
        """Whether `point` is certainly over when the actor does its next thing."""
        host = 0 if actor == HOST else self._clocks[HOST].get(point.actor, 0)
        return point.number <= max(self._clock(actor).get(point.actor, 0), host)


def _join(clock: Moment, other: Moment) -> None:
    for actor, number in other.items():
        clock[actor] = max(clock.get(actor, 0), number)
