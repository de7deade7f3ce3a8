"""Traces of a few layers, from which the deeper models of a family of layouts are extrapolated.

All layers of a GPT are alike. Memory and traffic are therefore linear in the number of layers, in the micro-batches
that a stage retains, and nearly so in the size of a micro-batch. A family is traced at the few points that these lines
need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from repro.config import Experiment, Layout, Model, OperatorSet, Training
from repro.config.engines import has_fused_softmax
from repro.parallel.pipeline.schedule import build_schedule, in_flight
from repro.simulate.plan.closed_form import ALL, FIRST, LAST, MIDDLE
from repro.simulate.plan.extrapolation.lower_bound import MinimumWork
from repro.simulate.trace.events import Alloc, Event, Message, Operator, PhaseStart, Wait
from repro.util.processes import pause_garbage_collection
from repro.util.workers import LazyPickle

if TYPE_CHECKING:
    from repro.simulate.trace.roles import Trace

DEVICE_KEPT = ("activations", "checkpoints")
RETAINED_CATEGORIES = (*DEVICE_KEPT, "host")
"""Categories that hold something for every layer and micro-batch in flight."""
PEAK_WEIGHTS = (0, 1, 16)
"""A phase's peak may be at another moment in a deeper model, one at which more is kept for the backward pass.
So as many moments are noted: where all live bytes, and once and 16 times more those kept, are most."""
END_ROLES, MIDDLE_ROLES = (ALL, FIRST, LAST), (MIDDLE,)
"""Roles that are not between others, and the one that is."""
MessageKind = tuple[str, str, str]
"""Operation, group and purpose of messages."""


@dataclass(frozen=True)
class ShallowProfile:
    """What one shallow trace of one role says.  Bytes."""

    layers: int
    """Of one part of the model: of a stage, or of a stage's chunk."""
    in_flight: int
    """Micro-batches (times chunks) whose activations are kept."""
    layout: Layout
    parameters: int
    live: dict[str, tuple[dict[str, int], ...]]
    """By phase: what is live by category, at the moments of the phase that could be its peak (`PEAK_WEIGHTS`)."""
    most: dict[str, int]
    """The most of each category at any moment."""
    rows: dict[MessageKind, tuple[int, int]]
    """Payload of the messages: of all micro-batches traced, and of one more."""
    micro_batches: int
    """Of these, how many were traced."""
    carried: LazyPickle[Trace]

    @property
    def timed(self) -> Trace:
        """The trace without allocations, and of what came before its step messages only: what seconds follow from."""
        return self.carried.value


@dataclass(frozen=True)
class LayoutFamily:
    """The profiles of one role from which all layouts of a family follow."""

    base: ShallowProfile
    deeper: ShallowProfile
    """With more layers."""
    wider: ShallowProfile
    """With the largest micro-batch of the family (or `base`)."""
    longer: ShallowProfile
    """With more micro-batches in flight (or `base`); of the stages in the middle, whose memory nobody asks for
    since the first one keeps more, `base`."""
    work: MinimumWork
    """Of a micro-batch, at least."""


def family_of(layout: Layout, heads: int, seq: int) -> Layout:
    """The layout that stands for all that differ from `layout` in depth, stages and batch only.

    `heads` of the model, `seq` tokens of a sample.  Where the operators of attention depend on the micro-batch, its own
    tells apart those who run others.
    """
    deep = layout.pp > 1
    dp = max(1, layout.world // (2 * layout.tp * layout.cp)) if deep else layout.dp
    apart = layout.kernels is OperatorSet.SOFTMAX and not has_fused_softmax(
        layout.micro_batch, heads // layout.tp, seq
    )
    return _shallow(layout, 2 if deep else 1, 2 if apart else 1, dp)


def _shallow(layout: Layout, pp: int, micro_batch: int = 1, dp: int = 0) -> Layout:
    """`layout` with `pp` stages and few micro-batches, but first, ordinary and last among them."""
    dp = dp or layout.dp
    count = 2 * pp if pp > 1 and layout.schedule != "1f1b" else 3
    whole = count * micro_batch * dp
    return replace(layout, pp=pp, dp=dp, stage_layers=(), micro_batch=micro_batch, global_batch=whole)


@pause_garbage_collection()
def trace_family(
    model: Model, seq: int, layout: Layout, narrowest: int, widest: int, names: Sequence[str]
) -> tuple[dict[str, LayoutFamily], int]:
    """The families of each role of `layout` (from `family_of`) that has one of `names`, and how many traces it took.

    `narrowest` and `widest`: the smallest and the largest micro-batch that will be asked for.  `names`: `END_ROLES`, or
    `BETWEEN`, which three stages have.
    """
    made = 0

    def profiles(shallow: Layout, layers: int, names: Sequence[str]) -> dict[str, ShallowProfile]:
        nonlocal made
        sizes = replace(model, layers=layers * shallow.pp * shallow.chunks)
        found = _profiles(
            Experiment(name="shallow", model=sizes, layout=shallow, training=Training(seq=seq)), layers, names
        )
        made += len(found)
        return found

    few, many = _depths(layout)
    narrow = _shallow(layout, 3 if names == MIDDLE_ROLES else layout.pp, narrowest)
    base, deeper = profiles(narrow, few, names), profiles(narrow, many, names)
    wider = profiles(_shallow(layout, narrow.pp, widest), few, names) if widest > narrowest else base
    longer = dict(base)
    if narrow.pp == 2:
        three = _shallow(layout, 3, narrowest)
        others = [
            name
            for name in base
            if micro_batches_in_flight(three, _stage(three, name)) != base[name].in_flight
        ]
        longer |= profiles(three, few, others)
    return {
        name: LayoutFamily(
            base[name],
            deeper[name],
            wider[name],
            longer[name],
            MinimumWork.of_traces(base[name].timed, deeper[name].timed, wider[name].timed, (few, many)),
        )
        for name in base
    }, made


def _depths(layout: Layout) -> tuple[int, int]:
    """Layers of a part in the shallow traces: as many as are under way at once, and some more."""
    if layout.zero >= 2:  # several blocks' gradients, under stage 3 their parameters as well
        return (3, 4) if layout.pp > 1 else (4, 6)
    return (1, 2) if layout.pp > 1 else (2, 4)


def micro_batches_in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches (times chunks) in flight on a stage."""
    if layout.schedule == "interleaved":
        return _in_flight(layout.schedule, layout.pp, layout.accumulation, layout.chunks)[stage]
    # Known without the schedule, which has thousands of actions on a deep pipeline (2104.04473 sec. 2.2).
    m = layout.accumulation
    return m if layout.schedule == "gpipe" else min(m, layout.pp - stage)


@cache
def _in_flight(name: str, stages: int, micro_batches: int, chunks: int) -> list[int]:
    return [in_flight(actions) for actions in build_schedule(name, stages, micro_batches, chunks)]


def _stage(layout: Layout, name: str) -> int:
    return layout.pp - 1 if name == LAST else 0


def _profiles(experiment: Experiment, layers: int, names: Sequence[str]) -> dict[str, ShallowProfile]:
    """Those of the roles that have one of `names`."""
    from repro.simulate.trace.roles import roles, trace

    found = {}
    for role in roles(experiment):
        name = role.name.partition(" (")[0]
        if name in names:
            found[name] = _profile(experiment.layout, layers, role.stage, trace(experiment, role))
    return found


def _profile(layout: Layout, layers: int, stage: int, traced: Trace) -> ShallowProfile:
    from repro.simulate.trace.roles import TYPICAL_MICRO_BATCH

    rows: dict[MessageKind, tuple[int, int]] = {}
    ordinary = 0
    for event in traced.step:
        if isinstance(event, PhaseStart):
            ordinary = int(event.micro_batch == TYPICAL_MICRO_BATCH)
        elif isinstance(event, Message):
            key = (event.op, event.group, event.purpose)
            total, one = rows.get(key, (0, 0))
            rows[key] = (total + event.payload, one + ordinary * event.payload)
    live, most = _moments(traced.events)
    return ShallowProfile(
        layers=layers,
        in_flight=micro_batches_in_flight(layout, stage),
        layout=layout,
        parameters=traced.parameters,
        live=live,
        most=most,
        rows=rows,
        micro_batches=traced.layout.accumulation,
        carried=LazyPickle(_timed(traced)),
    )


def _timed(traced: Trace) -> Trace:
    """`traced` without what takes no time.  Equal events are one object, which makes it small to send."""
    known: dict[Event, Event] = {}
    before = [e for e in traced.events[: traced.step_start] if isinstance(e, Message)]
    step = [
        known.setdefault(event, event)
        for event in traced.events[traced.step_start : traced.step_stop]
        if isinstance(event, (Operator, Message, Wait, PhaseStart))
    ]
    events = [*before, *step]
    return replace(traced, events=events, step_start=len(before), step_stop=len(events))


def _moments(events: Iterable[Event]) -> tuple[dict[str, tuple[dict[str, int], ...]], dict[str, int]]:
    """Return the live bytes by category at the peaks of each phase, weighted as in `PEAK_WEIGHTS`, and each peak."""
    from repro.simulate.memory.live_bytes import LiveBytes

    live, phase = LiveBytes(), ""
    found: dict[str, list[dict[str, int]]] = {}
    most: dict[str, list[int]] = {}
    for event in events:
        live.see(event)
        if isinstance(event, PhaseStart):
            phase = event.name
            most.setdefault(phase, [-1] * len(PEAK_WEIGHTS))
            found.setdefault(phase, [{}] * len(PEAK_WEIGHTS))
        elif not isinstance(event, Alloc):
            continue
        retained, now = 0, None
        for category in DEVICE_KEPT:
            retained += live.now[category]
        for i, weight in enumerate(PEAK_WEIGHTS):
            if live.total + weight * retained > most[phase][i]:
                now = now or dict(live.now)
                most[phase][i], found[phase][i] = live.total + weight * retained, now
    return {phase: tuple(moments) for phase, moments in found.items()}, live.most
