"""Trace of one role's step: the real engine on `meta` tensors, without a device or a peer.

Ranks that do the same are traced once, as one role. All replicas and all tp ranks do the same. Pipeline stages differ
by embedding or head, by their number of layers, and by their number of micro-batches in flight. The trace runs as many
micro-batches as fill the pipeline. The other micro-batches are copies of the second one, which is neither first nor
last.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TypeVar

import torch

from repro.config import Experiment, Layout
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.measure.operators import without_compiler
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel.ledger import SEND
from repro.parallel.pipeline.boundary import Boundary
from repro.parallel.pipeline.schedule import Action, build_schedule, peak_in_flight
from repro.parallel.transports import Transport
from repro.simulate.trace.events import Alloc, Event, Free, Message, Operator, PhaseStart, Timed, Wait
from repro.simulate.trace.recorder import RecordingLedger, TraceRecorder, no_action
from repro.simulate.trace.repeat import BlockRepeater, recordings_of
from repro.simulate.trace.transport import GlooBufferTransport, NoDataTransport, RecordedTransport
from repro.util.processes import pause_garbage_collection

TimedEvent = TypeVar("TimedEvent", Operator, Message)
TYPICAL_MICRO_BATCH = 1
"""The micro-batch that represents the micro-batches that did not run."""


@dataclass(frozen=True)
class PipelineRole:
    """Ranks that do the same in a step."""

    name: str
    """`all`, or `first`, `middle`, `last` for the stages of the role."""
    stage: int
    stages: int
    """Number of stages of the role; the traced one has the most micro-batches in flight."""


@dataclass(eq=False)
class Trace:
    """Initialisation and one ordinary step of one role."""

    role: PipelineRole
    layout: Layout
    """Layout with the number of micro-batches that ran."""
    events: list[Event]
    step_start: int
    """Index of the first event of the step; preceding events are initialisation."""
    step_stop: int
    """Index of the first event after the step, which waits for the step's unfinished work."""
    copies: int
    """Number of further micro-batches like `TYPICAL_MICRO_BATCH` in the real step."""
    parameters: int
    """Number of parameters of this rank."""
    padding: int

    @property
    def step(self) -> list[Event]:
        """The events of the ordinary step, and of the waits after it."""
        return self.events[self.step_start :]

    @cached_property
    def actions(self) -> Sequence[Action]:
        """The actions that ran, in order."""
        layout = self.layout
        return build_schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)[self.role.stage]

    @cached_property
    def pieces(self) -> list[list[Timed]]:
        """The timed events of each action; the last list has the events after the last action (the optimizer's)."""
        found: list[list[Timed]] = [[] for _ in range(len(self.actions) + 1)]
        at = 0
        append = found[0].append
        for event in self.events[self.step_start : self.step_stop]:
            if type(event) is Alloc or type(event) is Free:
                continue
            if type(event) is Operator or type(event) is Message or type(event) is Wait:
                append(event)
            elif type(event) is PhaseStart and event.position != at:
                # Events before the first action belong to the first action.
                at = event.position if event.position >= 0 else len(self.actions) if at else 0
                append = found[at].append
        return found

    @cached_property
    def keys(self) -> dict[int, tuple[object, ...]]:
        """Names of collectives by number. Counterparts in other micro-batches and steps have the same name."""
        keys: dict[int, tuple[object, ...]] = {}
        places: list[tuple[object, ...]] = [(action.kind, action.chunk) for action in self.actions]
        for place, piece in zip([*places, ("tail",)], self.pieces, strict=True):
            seen: Counter[tuple[str, str, str]] = Counter()
            for event in piece:
                if isinstance(event, Message) and event.op != SEND:
                    label = (event.op, event.group, event.purpose)
                    keys[event.work] = (*place, *label, seen[label])
                    seen[label] += 1
        # The preceding step gathered its parameters with the same collectives as this one.
        published = [e for e in self.pieces[-1] if isinstance(e, Message) and e.purpose == "parameters"]
        before = [
            e for e in self.events[: self.step_start] if isinstance(e, Message) and e.purpose == "parameters"
        ]
        for old, new in zip(reversed(before), reversed(published), strict=False):
            keys[old.work] = keys[new.work]
        return keys

    def _events_of(self, kind: type[TimedEvent]) -> Iterator[tuple[int, TimedEvent]]:
        """Return (number of repetitions, event) for all events of one kind in the full step."""
        weights: list[int] = [
            1 + self.copies * (action.micro_batch == TYPICAL_MICRO_BATCH) for action in self.actions
        ]
        for weight, piece in zip([*weights, 1], self.pieces, strict=True):
            for event in piece:
                if type(event) is kind:
                    yield weight, event

    def operators(self) -> Iterator[tuple[int, Operator]]:
        """Return (number of repetitions, operator) for all operators of the full step."""
        return self._events_of(Operator)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Return (number of repetitions, message) for all messages of the full step."""
        return self._events_of(Message)


def roles(experiment: Experiment) -> list[PipelineRole]:
    """Return the roles of an experiment, one stage each."""
    layout = experiment.layout
    if layout.pp == 1:
        return [PipelineRole("all", 0, 1)]
    parts = layout.parts(experiment.model.layers)
    kinds: dict[tuple[bool, bool, tuple[int, ...]], list[int]] = {}
    for stage in range(layout.pp):
        sizes = tuple(len(part) for part in parts[stage :: layout.pp])
        kinds.setdefault((stage == 0, stage == layout.pp - 1, sizes), []).append(stage)
    found = []
    for (first, last, _), stages in kinds.items():
        name = "first" if first else "last" if last else f"middle ({len(stages)} stages, {stages[0]} on)"
        # Earlier stages have more micro-batches in flight.
        found.append(PipelineRole(name, stages[0], len(stages)))
    return found


def trace(
    experiment: Experiment,
    role: PipelineRole,
    *,
    gloo: bool = False,
    recorder: TraceRecorder | None = None,
    repeat: bool = True,
) -> Trace:
    """Run initialisation and an ordinary step of `role` on shapes only.

    `gloo`: count the receive buffers that gloo's transport needs, for comparison with runs on CPUs. `recorder`: a new
    one that records more than events, with `repeat` off. `repeat`: see `.repeat`; it changes no events.
    """
    _import_shape_functions()
    layout = shortened(experiment.layout, role.stage)
    short = replace(experiment, layout=layout)
    rank = layout.group_of("pp", 0)[role.stage]
    recorder = recorder or TraceRecorder()
    recorder.on_processors = gloo

    def transport_of(ranks: tuple[int, ...]) -> Transport:
        real = gloo and rank in ranks
        return RecordedTransport(
            GlooBufferTransport(len(ranks), ranks.index(rank)) if real else NoDataTransport(), recorder
        )

    mesh = meshes.build_mesh(layout, rank, transport_of, RecordingLedger(recorder.events))
    device = torch.device("meta")
    with pause_garbage_collection(), without_compiler(), recorder:
        engine = NativeEngine(short, mesh, device)
        pipeline = engine.pipeline
        recorder.under_way = lambda: (
            (pipeline.current.micro_batch, pipeline.position) if pipeline.current else no_action()
        )
        repeats = BlockRepeater(recorder, pipeline, recordings_of(short, gloo), engine.checkpoints)
        for chunk, part in enumerate(engine.parts if repeat else ()):
            repeats.attach(part, chunk)
        # Tokens and targets of a step, and on a GPU those of the next one (`repro.launch.rank.step_data`).
        shape = 2, experiment.layout.replica_batch, experiment.seq
        inputs = [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(1 if gloo else 2)]
        tokens, targets = inputs[0][:, : layout.micro_batch]
        # As after an earlier step, whose parameters are still being gathered when the next step begins.
        for part in engine.parts:
            part.sharded.all_gather_params()
        start = len(recorder.events)
        engine.step([MicroBatch(tokens, targets, BatchPosition(0, 0))] * layout.accumulation, recorder.phase)
        stop = len(recorder.events)
        engine.synchronize()
    # The collector cannot see cycles through a tensor: parameters hold their hooks, storages hold the recorder.
    recorder.under_way = no_action
    repeats.detach()
    for part in engine.parts:
        part.sharded.remove_hooks()
    return Trace(
        role,
        layout,
        recorder.finish(),
        start,
        stop,
        experiment.layout.accumulation - layout.accumulation,
        engine.local_parameters(),
        engine.padding(),
    )


def trace_roles(experiment: Experiment, *, gloo: bool = False) -> list[Trace]:
    """Return the `trace` of every role."""
    return [trace(experiment, role, gloo=gloo) for role in roles(experiment)]


@cache
def _import_shape_functions() -> None:
    """Import the modules that torch's shape functions import at the first call, which would retain tensors.

    `gc.freeze` excludes the imported objects from later collections.
    """
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    gc.freeze()


def shortened(layout: Layout, stage: int) -> Layout:
    """Return `layout` with few micro-batches: a full pipeline, and a first, an ordinary and a last one."""
    m = layout.accumulation
    unit = layout.pp if layout.schedule == "interleaved" else 1
    live = partial(peak_in_flight, layout.schedule, stage, layout.pp, chunks=layout.chunks)
    count = unit
    while count < m and (count < 3 or live(count) < live(m)):
        count += unit
    # At the peak a later stage also retains the gradients that it has sent in preceding backward passes.
    count = min(m, count + (max(unit, Boundary.UNDER_WAY) if layout.pp > 1 else unit))
    return replace(layout, global_batch=count * layout.micro_batch * layout.dp)
