"""Outlines of a trace's pieces: what follows what, without seconds, shared by all passes over the trace.

Layers and micro-batches repeat the same sequences of operators. Each distinct sequence has one number, so that a pass
computes its seconds once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from repro.simulate.trace.events import HOST_WAIT, Message, Operator, Timed, Wait
from repro.simulate.trace.roles import Trace

INNER_GROUP = "tp"
"""The group whose collectives begin and end within a layer."""


class Stretch(NamedTuple):
    """Operators and collectives awaited at once, up to the next event for which a rank does not wait or waits later."""

    entries: tuple[int | Message, ...]
    """Indices of operator sequences (`EventOutlines.sequences`), and awaited collectives without their numbers."""
    last: Message | Wait | None
    """Event after the operators: a message to a stage, the start of a collective, or a wait. None: none of these."""


class EventOutlines:
    """Pieces of a trace as stretches, in which equal sequences of operators have one number."""

    def __init__(self) -> None:
        self.sequences: list[dict[Operator, int]] = []
        """Number of each operator in each distinct sequence."""
        self._numbers: dict[tuple[int, ...], int] = {}
        self._operators: dict[int, int] = {}
        """Index in `_known` by the identity of an operator, because hashing an operator takes longer."""
        self._known: dict[Operator, int] = {}
        self._awaited: dict[Message, Message] = {}
        self._pieces: dict[int, list[Stretch]] = {}

    def of_piece(self, traced: Trace, place: int) -> list[Stretch]:
        """Return the stretches of one of the pieces of `traced`, whose events outlive this object."""
        if place not in self._pieces:
            self._pieces[place] = self.stretches(traced.pieces[place], traced.keys)
        return self._pieces[place]

    def stretches(self, events: Sequence[Timed], keys: Container[int]) -> list[Stretch]:
        """Return `events` as stretches. `keys`: numbers of collectives; other waits follow from the schedule."""
        found: list[Stretch] = []
        entries: list[int | Message] = []
        operators: list[int] = []
        numbers = self._operators

        def end_sequence() -> None:
            if operators:
                entries.append(self._sequence(tuple(operators)))
                operators.clear()

        def close(last: Message | Wait | None) -> None:
            end_sequence()
            if entries or last is not None:
                found.append(Stretch(tuple(entries), last))
                entries.clear()

        at = 0
        while at < len(events):
            event = events[at]
            at += 1
            if isinstance(event, Operator):
                if event.name == HOST_WAIT:
                    close(None)
                else:
                    number = numbers.get(id(event))
                    operators.append(self._number(event) if number is None else number)
            elif isinstance(event, Message):
                if at < len(events) and events[at] == Wait(event.work) and event.group == INNER_GROUP:
                    at += 1
                    end_sequence()
                    awaited = event._replace(work=-1)
                    entries.append(self._awaited.setdefault(awaited, awaited))
                else:
                    close(event)
            elif event.work in keys:
                close(event)
        close(None)
        return found

    def _number(self, operator: Operator) -> int:
        return self._operators.setdefault(id(operator), self._known.setdefault(operator, len(self._known)))

    def _sequence(self, operators: tuple[int, ...]) -> int:
        if operators not in self._numbers:
            self._numbers[operators] = len(self.sequences)
            known = list(self._known)
            self.sequences.append({known[number]: n for number, n in Counter(operators).items()})
        return self._numbers[operators]


_OUTLINES: WeakKeyDictionary[Trace, EventOutlines] = WeakKeyDictionary()


def outlines_of(traced: Trace) -> EventOutlines:
    """Return the outlines of a trace, which all passes over the trace share."""
    if traced not in _OUTLINES:
        _OUTLINES[traced] = EventOutlines()
    return _OUTLINES[traced]
