"""A shallow trace with another micro-batch: the operators and messages of two traces, and what lies between.

Sizes grow in a straight line with the samples of a micro-batch, so those of the narrowest and of the widest
trace say them all, to the element.  A single sample needs fewer copies, since some of its transposed tensors
are contiguous: operators that only the wide trace has grow from nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from repro.simulate.plan.shallow import LayoutFamily
from repro.simulate.trace.events import Event, Message, Operator, PhaseStart, Wait
from repro.simulate.trace.roles import Trace

AHEAD = 8
"""So many operators in a row may be in the wide trace only."""
_END = Wait(-2)
Names = tuple[str, ...]
Place = tuple[Event, ...]
"""An event with those before and after it, with the one before it, or alone."""


def widened(family: LayoutFamily, micro_batch: int) -> tuple[Trace, Trace]:
    """The timed traces of the family's `base` and `deeper` with `micro_batch` samples in each."""
    base, deeper, wider = (profile.timed for profile in (family.base, family.deeper, family.wider))
    narrowest, widest = (profile.layout.micro_batch for profile in (family.base, family.wider))
    if micro_batch == narrowest:
        return base, deeper
    part = (micro_batch - narrowest) / (widest - narrowest)
    seen: dict[Place, Counter[tuple[Event, ...]]] = defaultdict(Counter)
    narrow = _sized(base)
    for at, others in enumerate(_aligned(narrow, _sized(wider))):
        grown = tuple(_grown(narrow[at], other, part, micro_batch / widest) for other in others)
        for place in _places(narrow, at):
            seen[place][grown] += 1
    known = {place: found.most_common(1)[0][0] for place, found in seen.items()}
    return _replaced(base, known), _replaced(deeper, known)


def _replaced(traced: Trace, known: Mapping[Place, tuple[Event, ...]]) -> Trace:
    """`traced` with what stands in its places."""
    sized, at = _sized(traced), -1
    events: list[Event] = []
    for event in traced.events:
        if isinstance(event, PhaseStart):
            events.append(event)
            continue
        at += 1
        there = [place for place in _places(sized, at) if place in known]
        # What is not there depends on the depth, as the optimizer's buffers do, and not on the micro-batch.
        for found in known[there[0]] if there else (event,):
            if isinstance(found, Message) and isinstance(event, Message):
                found = event._replace(payload=found.payload, sent=found.sent)
            events.append(event if isinstance(found, Wait) else found)
    start = next(i for i, event in enumerate(events) if isinstance(event, PhaseStart))
    return replace(traced, events=events, step_start=start, step_stop=len(events))


def _sized(traced: Trace) -> list[Event]:
    return [_key(event) for event in traced.events if not isinstance(event, PhaseStart)]


def _key(event: Event) -> Event:
    """A message or a wait without its number."""
    return event._replace(work=-1) if isinstance(event, (Message, Wait)) else event


def _places(events: Sequence[Event], at: int) -> Iterator[Place]:
    """Where an event is, the most exact first: blocks are alike, and so are their neighbours."""
    yield tuple(events[max(0, at - 1) : at + 2])
    yield (*events[max(0, at - 1) : at + 1], _END)
    yield (events[at],)


def _aligned(narrow: Sequence[Event], wide: Sequence[Event]) -> Iterator[tuple[Event, ...]]:
    """For each narrow event its wide counterpart (nothing if it has none), and what the wide trace has after it."""
    names, wides = [_name(event) for event in narrow], [_name(event) for event in wide]
    at = 0
    for i in range(len(narrow)):
        others: list[Event] = []
        if at < len(wide) and wides[at] == names[i]:
            others.append(wide[at])
            at += 1
        following = names[i + 1 : i + 2]
        for more in range(AHEAD):
            if wides[at + more : at + more + 1] == following:
                others += wide[at : at + more]
                at += more
                break
        yield tuple(others)


def _name(event: Event) -> Names:
    if isinstance(event, Message):
        return event.op, event.group, event.purpose
    return (event.name,) if isinstance(event, Operator) else ("wait",)


def _grown(one: Event, other: Event, part: float, whole: float) -> Event:
    """`other`, or what lies the `part` of the way to it from `one` (from nothing: `whole` of it)."""
    alike = _name(one) == _name(other)

    def line(a: int, b: int) -> int:
        return round(a + (b - a) * part) if alike else round(b * whole)

    if isinstance(other, Wait):
        return other
    if isinstance(other, Message):
        assert isinstance(one, Message)
        return other._replace(payload=line(one.payload, other.payload), sent=line(one.sent, other.sent))
    assert isinstance(other, Operator)
    begun = one if isinstance(one, Operator) else other
    shapes = other.shapes
    if alike:
        shapes = tuple(
            tuple(line(a, b) for a, b in zip(mine, yours, strict=True))
            for mine, yours in zip(begun.shapes, other.shapes, strict=True)
        )
    return other._replace(
        flops=line(begun.flops, other.flops),
        read=line(begun.read, other.read),
        written=line(begun.written, other.written),
        shapes=shapes,
    )
