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

PURPOSE_STOP = 1 + Message._fields.index("purpose")
"""Number of fields of a message up to its purpose."""
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
        self._numbers: dict[tuple[int | None, ...], int] = {}
        self._operators: dict[int, int] = {}
        """Index in `_known` by the identity of an operator, because hashing an operator takes longer."""
        self._known: dict[Operator, int] = {}
        self._awaited: dict[tuple[object, ...], Message] = {}
        """Collectives without their numbers, by their fields up to the purpose."""
        self._pieces: dict[int, list[Stretch]] = {}

    def of_piece(self, traced: Trace, place: int) -> list[Stretch]:
        """Return the stretches of one of the pieces of `traced`, whose events outlive this object."""
        if place not in self._pieces:
            self._pieces[place] = self.stretches(traced.pieces[place], traced.keys)
        return self._pieces[place]

    def ordered(self, number: int) -> list[Operator]:
        """Return the operators of a distinct sequence in the order in which they run."""
        known, sequences = list(self._known), list(self._numbers)
        return [known[at] for at in sequences[number] if at is not None]

    def stretches(self, events: Sequence[Timed], keys: Container[int]) -> list[Stretch]:
        """Return `events` as stretches. `keys`: numbers of collectives; other waits follow from the schedule."""
        found: list[Stretch] = []
        entries: list[int | Message] = []

        def close(last: Message | Wait | None) -> None:
            if entries or last is not None:
                found.append(Stretch(tuple(entries), last))
                entries.clear()

        begin = 0
        others = [
            at for at, event in enumerate(events) if type(event) is not Operator or event.name == HOST_WAIT
        ]
        for at in others:
            if at < begin:
                continue
            event = events[at]
            if begin < at:
                entries.append(self._sequence(events[begin:at]))
            begin = at + 1
            if isinstance(event, Message):
                following = events[begin] if begin < len(events) else None
                is_awaited = isinstance(following, Wait) and following.work == event.work
                if event.group == INNER_GROUP and is_awaited:
                    begin += 1
                    kind = event[:PURPOSE_STOP]
                    if kind not in self._awaited:
                        self._awaited[kind] = event._replace(work=-1)
                    entries.append(self._awaited[kind])
                else:
                    close(event)
            elif isinstance(event, Operator):
                close(None)
            elif event.work in keys:
                close(event)
        if begin < len(events):
            entries.append(self._sequence(events[begin:]))
        close(None)
        return found

    def _sequence(self, operators: Sequence[Timed]) -> int:
        """Return the number of a sequence of operators."""
        numbers = tuple(map(self._operators.get, map(id, operators)))
        if None in numbers:
            for operator in operators:
                if id(operator) not in self._operators and isinstance(operator, Operator):
                    self._operators[id(operator)] = self._known.setdefault(operator, len(self._known))
            return self._sequence(operators)
        if numbers not in self._numbers:
            self._numbers[numbers] = len(self.sequences)
            of_number = list(self._known)
            self.sequences.append(
                {of_number[number]: n for number, n in Counter(numbers).items() if number is not None}
            )
        return self._numbers[numbers]


_OUTLINES: WeakKeyDictionary[Trace, EventOutlines] = WeakKeyDictionary()


def outlines_of(traced: Trace) -> EventOutlines:
    """Return the outlines of a trace, which all passes over the trace share."""
    if traced not in _OUTLINES:
        _OUTLINES[traced] = EventOutlines()
    return _OUTLINES[traced]
