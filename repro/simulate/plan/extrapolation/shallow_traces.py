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
"""Categories that hold memory for every layer and micro-batch in flight."""
PEAK_WEIGHTS = (0, 1, 16)
"""Weights of retained bytes at the recorded moments of a phase. In a deeper model, the peak may be at another moment
with more bytes retained for the backward pass. Each weight adds the moment with the most live bytes plus `weight` times
the retained bytes."""
END_ROLES, MIDDLE_ROLES = (ALL, FIRST, LAST), (MIDDLE,)
"""Roles at an end of the pipeline, and the role between them."""
MessageKind = tuple[str, str, str]
"""Operation, group and purpose of messages."""


@dataclass(frozen=True)
class ShallowProfile:
    """Memory and traffic of one shallow trace of one role, in bytes."""

    layers: int
    """Layers of one part of the model: of a stage, or of a stage's chunk."""
    in_flight: int
    """Micro-batches (times chunks) with retained activations."""
    layout: Layout
    parameters: int
    live: dict[str, tuple[dict[str, int], ...]]
    """Live bytes by category at the possible peaks of each phase (`PEAK_WEIGHTS`)."""
    most: dict[str, int]
    """Peak of each category."""
    rows: dict[MessageKind, tuple[int, int]]
    """Payload of the messages: of all traced micro-batches, and of one more."""
    micro_batches: int
    """Number of traced micro-batches."""
    carried: LazyPickle[Trace]

    @property
    def timed(self) -> Trace:
        """The trace without allocations; of the events before the step, it has messages only."""
        return self.carried.value


@dataclass(frozen=True)
class LayoutFamily:
    """The profiles of one role from which all layouts of a family are extrapolated."""

    base: ShallowProfile
    deeper: ShallowProfile
    """Profile with more layers."""
    wider: ShallowProfile
    """Profile with the largest micro-batch of the family (or `base`)."""
    longer: ShallowProfile
    """Profile with more micro-batches in flight (or `base`). Middle stages have `base`, because the first stage retains
    more and decides the memory."""
    work: MinimumWork
    """Minimum work of the micro-batches."""


def family_of(layout: Layout, heads: int, seq: int) -> Layout:
    """Return the layout that represents all layouts that differ from `layout` only in depth, stages and batch.

    `heads` of the model, `seq` tokens of a sample. If the operators of attention depend on the micro-batch, layouts
    with other operators are in another family.
    """
    deep = layout.pp > 1
    dp = max(1, layout.world // (2 * layout.tp * layout.cp)) if deep else layout.dp
    apart = layout.kernels is OperatorSet.SOFTMAX and not has_fused_softmax(
        layout.micro_batch, heads // layout.tp, seq
    )
    return _shallow(layout, 2 if deep else 1, 2 if apart else 1, dp)


def _shallow(layout: Layout, pp: int, micro_batch: int = 1, dp: int = 0) -> Layout:
    """Return `layout` with `pp` stages and few micro-batches, including a first, an ordinary and a last one."""
    dp = dp or layout.dp
    count = 2 * pp if pp > 1 and layout.schedule != "1f1b" else 3
    whole = count * micro_batch * dp
    return replace(layout, pp=pp, dp=dp, stage_layers=(), micro_batch=micro_batch, global_batch=whole)


@pause_garbage_collection()
def trace_family(
    model: Model, seq: int, layout: Layout, narrowest: int, widest: int, names: Sequence[str]
) -> tuple[dict[str, LayoutFamily], int]:
    """Return the family of each role in `names` of `layout` (from `family_of`), and the number of traces.

    `narrowest` and `widest`: the smallest and the largest micro-batch of the requests. `names`: `END_ROLES`, or
    `MIDDLE_ROLES`, which three stages have.
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
    """Return the layers of a part in the two shallow traces: the layers in use at once, and some more."""
    if layout.zero >= 2:  # several blocks' gradients, under stage 3 their parameters as well
        return (3, 4) if layout.pp > 1 else (4, 6)
    return (1, 2) if layout.pp > 1 else (2, 4)


def micro_batches_in_flight(layout: Layout, stage: int) -> int:
    """Return the number of micro-batches (times chunks) in flight on a stage."""
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
    """Return the profiles of the roles in `names`."""
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
    """Return `traced` without events that take no time. Equal events share one object, which makes pickles small."""
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
