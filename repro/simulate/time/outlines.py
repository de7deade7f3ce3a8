"""Short form of a trace without times, in which a number stands for each distinct sequence of operators.

Layers and micro-batches repeat the same sequences, so a time prediction computes the seconds of each sequence once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from repro.simulate.trace.events import HOST_WAIT, Message, Operator, Timed, Wait
from repro.simulate.trace.roles import Trace

PURPOSE_STOP = 1 + Message._fields.index("purpose")
"""Number of `Message` fields up to `purpose`, which describe the kind of a collective; later fields identify it."""
INNER_GROUP = "tp"
"""Name of the process group whose collectives begin and end within a layer."""


class Stretch(NamedTuple):
    """Part of a trace: operators and immediately awaited collectives, up to the next asynchronous message or wait."""

    entries: tuple[int | Message, ...]
    """Numbers of operator sequences (see `EventOutlines`) and immediately awaited collectives, in order."""
    last: Message | Wait | None
    """Event that ends this part: a message to another stage, the start of a collective, a wait, or no event (None)."""


class EventOutlines:
    """Events of each forward or backward pass of a trace, with a number for each distinct sequence of operators."""

    def __init__(self) -> None:
        self.sequences: list[dict[Operator, int]] = []
        """Number of occurrences of each operator, for each distinct sequence of operators."""
        self._numbers: dict[tuple[int | None, ...], int] = {}
        self._operators: dict[int, int] = {}
        """Index of each distinct operator, by the `id()` of its event, because hashing the event takes longer."""
        self._known: dict[Operator, int] = {}
        self._awaited: dict[tuple[object, ...], Message] = {}
        """One `Message` without number for each kind of collective that the compute stream awaits immediately."""
        self._pieces: dict[int, list[Stretch]] = {}

    def of_piece(self, traced: Trace, place: int) -> list[Stretch]:
        """Split pass number `place` at asynchronous messages and waits. The trace `traced` must outlive this object."""
        if place not in self._pieces:
            self._pieces[place] = self.stretches(traced.pieces[place], traced.keys)
        return self._pieces[place]

    def ordered(self, number: int) -> list[Operator]:
        """Return the operators of the sequence with the index `number`, in the order in which they run."""
        known, sequences = list(self._known), list(self._numbers)
        return [known[at] for at in sequences[number] if at is not None]

    def stretches(self, events: Sequence[Timed], keys: Container[int]) -> list[Stretch]:
        """Split `events` after each asynchronous message and each wait for a collective whose number is in `keys`."""
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
        """Return the number of a sequence of operators. A new sequence gets the next number."""
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
    """Return the cached short form (`EventOutlines`) of a trace, which all time predictions from this trace share."""
    if traced not in _OUTLINES:
        _OUTLINES[traced] = EventOutlines()
    return _OUTLINES[traced]
