"""Memory, traffic and operators of a layout, extrapolated linearly from the shallow traces of its family.

For each phase of the step and category of memory, with l layers of a part, f micro-batches in flight and b samples of a
micro-batch:

    model states    closed form (`repro.simulate.plan.closed_form`), and the trace's bytes in addition to it
    other           the trace's bytes, interpolated in b, and for every further layer and micro-batch in flight the
                    bytes that one layer retains of one sample:  b (c (f l - f0 l0) + d (f - f0))

Live bytes are accurate to about one percent. The allocator's reserved bytes are not estimated: they follow from the
order of all allocations, which only a full trace has. Stages between first and last are left out, because they hold no
embedding and retain fewer micro-batches than the first.

Sizes of operators and messages grow linearly with the samples of a micro-batch. A single sample needs fewer copies, so
operators that only the wide trace has grow from nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from repro.config import Layout, Model
from repro.config.system import System
from repro.parallel.ledger import RING_PASSES, SEND
from repro.simulate.placement import Placement
from repro.simulate.plan.closed_form import LAST, MIDDLE, state_bytes
from repro.simulate.plan.extrapolation.lower_bound import SystemRates, step_time_lower_bound
from repro.simulate.plan.extrapolation.shallow_traces import (
    PEAK_WEIGHTS,
    RETAINED_CATEGORIES,
    LayoutFamily,
    MessageKind,
    ShallowProfile,
    micro_batches_in_flight,
)
from repro.simulate.trace.events import Event, Message, Operator, PhaseStart, Wait

if TYPE_CHECKING:
    from repro.simulate.trace.roles import Trace

PHASES_WITHOUT_ACTIVATIONS = ("init", "optimizer")
"""Phases without live activations."""
HOST = "host"


@dataclass(frozen=True)
class RoleEstimate:
    """Peak memory of one role of a layout, in bytes of one rank."""

    peak_bytes: int
    phase: str
    by_category: dict[str, int]
    """Live bytes at the peak."""
    states_bytes: int


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sends in a step, by group and by class of links."""

    by_group: dict[str, int]
    by_link: dict[str, int]


def estimate_memory(
    model: Model, layout: Layout, families: dict[str, LayoutFamily]
) -> dict[str, RoleEstimate]:
    """Return the peak memory of the roles of `layout`: `all`, or `first` and `last`."""
    layers = model.layers // (layout.pp * layout.chunks)
    return {
        name: _role(
            layout, layers, micro_batches_in_flight(layout, layout.pp - 1 if name == LAST else 0), family
        )
        for name, family in families.items()
        if name != MIDDLE
    }


def _role(layout: Layout, layers: int, in_flight: int, family: LayoutFamily) -> RoleEstimate:
    parameters = _line(family.base.parameters, family.deeper.parameters, _deeper(family, layers))
    states = state_bytes(parameters, layout)
    more = {category: _more(family, category, layers, in_flight) for category in RETAINED_CATEGORIES}
    moments = []
    for phase in family.base.live:
        for i in range(len(PEAK_WEIGHTS)):
            found = _live_at_moment(family, phase, i, layers, layout, more)
            sizes = {key: max(0, round(size + states.get(key, 0.0))) for key, size in found.items()}
            moments.append((phase, sizes))
    phase, peak = max(moments, key=lambda moment: _device(moment[1]))
    return RoleEstimate(_device(peak), phase, peak, round(sum(states.values())))


def _device(categories: dict[str, int]) -> int:
    return sum(size for category, size in categories.items() if category != HOST)


def _line(at_base: float, at_other: float, times: float) -> float:
    return at_base + (at_other - at_base) * times


def _deeper(family: LayoutFamily, layers: int) -> float:
    """Return the distance of `layers` from `base`, in units of the distance from `base` to `deeper`."""
    return (layers - family.base.layers) / (family.deeper.layers - family.base.layers)


def _wider(family: LayoutFamily, micro_batch: int) -> float:
    step = family.wider.layout.micro_batch - family.base.layout.micro_batch
    return (micro_batch - family.base.layout.micro_batch) / step if step else 0.0


def _more(family: LayoutFamily, category: str, layers: int, in_flight: int) -> tuple[float, float]:
    """Return c, the retained bytes per layer and sample, and those beyond `base`: c (f l - f0 l0) + d (f - f0)."""
    base, deeper, longer = family.base, family.deeper, family.longer
    samples = base.layout.micro_batch
    per_layer = (deeper.most[category] - base.most[category]) / (_step(family) * base.in_flight * samples)
    per_pass = 0.0
    if longer.in_flight != base.in_flight:
        more = (longer.most[category] - base.most[category]) / (longer.in_flight - base.in_flight)
        per_pass = more / samples - per_layer * base.layers
    more = per_layer * (in_flight * layers - base.in_flight * base.layers)
    return per_layer, more + per_pass * (in_flight - base.in_flight)


def _live_at_moment(
    family: LayoutFamily,
    phase: str,
    moment: int,
    layers: int,
    layout: Layout,
    more: dict[str, tuple[float, float]],
) -> dict[str, float]:
    """Return the live bytes at one of a phase's moments, without the closed form of the states."""

    def beside(profile: ShallowProfile) -> dict[str, float]:
        closed = state_bytes(profile.parameters, profile.layout)
        at = profile.live[phase][moment] if phase in profile.live else {}
        return {category: at.get(category, 0) - closed.get(category, 0.0) for category in profile.most}

    def extended(profile: ShallowProfile) -> dict[str, float]:
        found = beside(profile)
        samples = profile.layout.micro_batch
        for category, (per_layer, further) in more.items():
            # If bytes are retained at that moment, a deeper model has a moment with nearly all further bytes retained.
            if per_layer and found[category] >= samples * per_layer / 2:
                found[category] += samples * further
        return found

    if phase in PHASES_WITHOUT_ACTIVATIONS:
        at_base, other, times = beside(family.base), beside(family.deeper), _deeper(family, layers)
    else:
        at_base, other = extended(family.base), extended(family.wider)
        times = _wider(family, layout.micro_batch)
    return {category: _line(at_base[category], other[category], times) for category in at_base}


def estimate_traffic(
    model: Model, layout: Layout, families: dict[str, LayoutFamily], system: System
) -> dict[str, SentBytes]:
    """Return the bytes that one rank of each role sends in a step; `middle` exists with more than two stages."""
    placement = Placement(layout, system)
    dp = next(iter(families.values())).base.layout.dp
    return {
        name: _sent(layout, rows, placement, name, dp)
        for name, rows in estimate_payloads(model, layout, families).items()
    }


def estimate_payloads(
    model: Model, layout: Layout, families: dict[str, LayoutFamily]
) -> dict[str, dict[MessageKind, float]]:
    """Return the bytes of all messages of a step of each role's rank, with `embedding` sharded as in the family."""
    layers = model.layers // (layout.pp * layout.chunks)
    return {
        name: _payloads(layout, layers, family)
        for name, family in families.items()
        if name != MIDDLE or layout.pp > 2
    }


def _payloads(layout: Layout, layers: int, family: LayoutFamily) -> dict[MessageKind, float]:
    base, further = family.base, layout.accumulation - family.base.micro_batches
    found = {}
    for row in base.rows:
        values = []
        for i in range(2):
            at = [profile.rows.get(row, (0, 0))[i] for profile in (base, family.deeper, family.wider)]
            per_step = at[1] - at[0]
            value = at[0] + per_step * (layers - base.layers) / _step(family)
            grows = at[2] / at[0] - 1 if at[0] else 0.0
            values.append(value * (1 + grows * _wider(family, layout.micro_batch)))
        found[row] = values[0] + further * values[1]
    return found


def _step(family: LayoutFamily) -> int:
    return family.deeper.layers - family.base.layers


def _sent(
    layout: Layout, rows: dict[MessageKind, float], placement: Placement, role: str, dp: int
) -> SentBytes:
    stage = {LAST: layout.pp - 1, MIDDLE: 1}.get(role, 0)
    rank = stage * layout.strides["pp"]
    by_group: dict[str, int] = {}
    by_link: dict[str, int] = {}
    for (op, group, _), payload in rows.items():
        ranks = placement.ranks_of(group, rank)
        size = len(ranks)
        if group == "embedding" and layout.zero:  # shards of the tied gradients: those of the family's dp
            payload *= dp / layout.dp
        sent = round(payload if op == SEND else RING_PASSES[op] * payload * (size - 1) / size)
        if not sent:  # a group of one sends nothing
            continue
        link = placement.link_of(group, ranks)
        by_group[group] = by_group.get(group, 0) + sent
        by_link[link] = by_link.get(link, 0) + sent
    return SentBytes(by_group, by_link)


def lower_bound(model: Model, layout: Layout, families: dict[str, LayoutFamily], rates: SystemRates) -> float:
    """Return a lower bound of the step time of `layout` in seconds; `ConfigError` as in `SystemRates.cost`."""
    of_role = {name: family.work for name, family in families.items()}
    sent = estimate_payloads(model, layout, families).values()
    return step_time_lower_bound(model, layout, of_role, sent, rates.cost(layout), rates.network(layout))


MAX_INSERTED_OPERATORS = 8
"""Maximum number of consecutive operators that only the wide trace has."""
_END = Wait(-2)
EventName = tuple[str, ...]
EventContext = tuple[Event, ...]
"""An event with its two neighbours, with the preceding one, or alone."""


def widen_traces(family: LayoutFamily, micro_batch: int) -> tuple[Trace, Trace]:
    """Return the timed traces of the family's `base` and `deeper`, resized to `micro_batch` samples."""
    base, deeper, wider = (profile.timed for profile in (family.base, family.deeper, family.wider))
    narrowest, widest = (profile.layout.micro_batch for profile in (family.base, family.wider))
    if micro_batch == narrowest:
        return base, deeper
    part = (micro_batch - narrowest) / (widest - narrowest)
    seen: dict[EventContext, Counter[tuple[Event, ...]]] = defaultdict(Counter)
    narrow = _sized(base)
    for at, others in enumerate(_aligned(narrow, _sized(wider))):
        grown = tuple(_grown(narrow[at], other, part, micro_batch / widest) for other in others)
        for place in _places(narrow, at):
            seen[place][grown] += 1
    known = {place: found.most_common(1)[0][0] for place, found in seen.items()}
    return _replaced(base, known), _replaced(deeper, known)


def _replaced(traced: Trace, known: Mapping[EventContext, tuple[Event, ...]]) -> Trace:
    """Return `traced` with the events that `known` has for their contexts."""
    sized, at = _sized(traced), -1
    events: list[Event] = []
    for event in traced.events:
        if isinstance(event, PhaseStart):
            events.append(event)
            continue
        at += 1
        there = [place for place in _places(sized, at) if place in known]
        # Other events depend on the depth and not on the micro-batch, like the optimizer's buffers.
        for found in known[there[0]] if there else (event,):
            if isinstance(found, Message) and isinstance(event, Message):
                found = event._replace(payload=found.payload, sent=found.sent)
            events.append(event if isinstance(found, Wait) else found)
    start = next(i for i, event in enumerate(events) if isinstance(event, PhaseStart))
    return replace(traced, events=events, step_start=start, step_stop=len(events))


def _sized(traced: Trace) -> list[Event]:
    return [_key(event) for event in traced.events if not isinstance(event, PhaseStart)]


def _key(event: Event) -> Event:
    """Return an event without the number of a message or a wait."""
    return event._replace(work=-1) if isinstance(event, (Message, Wait)) else event


def _places(events: Sequence[Event], at: int) -> Iterator[EventContext]:
    """Yield the contexts of an event, the most exact first, because blocks and their neighbours are alike."""
    yield tuple(events[max(0, at - 1) : at + 2])
    yield (*events[max(0, at - 1) : at + 1], _END)
    yield (events[at],)


def _aligned(narrow: Sequence[Event], wide: Sequence[Event]) -> Iterator[tuple[Event, ...]]:
    """Yield for each narrow event its wide counterpart, if any, and the inserted wide events after the counterpart."""
    names, wides = [_name(event) for event in narrow], [_name(event) for event in wide]
    at = 0
    for i in range(len(narrow)):
        others: list[Event] = []
        if at < len(wide) and wides[at] == names[i]:
            others.append(wide[at])
            at += 1
        following = names[i + 1 : i + 2]
        for more in range(MAX_INSERTED_OPERATORS):
            if wides[at + more : at + more + 1] == following:
                others += wide[at : at + more]
                at += more
                break
        yield tuple(others)


def _name(event: Event) -> EventName:
    if isinstance(event, Message):
        return event.op, event.group, event.purpose
    return (event.name,) if isinstance(event, Operator) else ("wait",)


def _grown(one: Event, other: Event, part: float, whole: float) -> Event:
    """Return the event at `part` of the way from `one` to `other`, or `whole` of `other` if they are unlike."""
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
