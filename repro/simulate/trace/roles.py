"""Trace of one step for each pipeline role: the real engine on `meta` tensors, without a device or other ranks.

Pipeline stages with equal layers form one role; all replicas and tp ranks of a stage do the same work. A trace runs
only as many micro-batches as fill the pipeline. The second micro-batch stands for all those that do not run.
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
"""Index of the traced micro-batch that represents all micro-batches that the trace does not run."""


@dataclass(frozen=True)
class PipelineRole:
    """Pipeline stages whose ranks do the same work in a step."""

    name: str
    """Name of the role: `all` without a pipeline; otherwise `first`, `last`, or a text that begins with `middle`."""
    stage: int
    """Index of the traced stage: of the role's stages, the one with the most micro-batches in flight."""
    stages: int
    """Number of pipeline stages with this role."""


@dataclass(eq=False)
class Trace:
    """Events of initialisation and of one step of a pipeline role."""

    role: PipelineRole
    layout: Layout
    """Layout whose global batch is reduced to the micro-batches that the trace runs."""
    events: list[Event]
    step_start: int
    """Index of the first event of the step; preceding events belong to initialisation."""
    step_stop: int
    """Index of the first event after the step. All events after the step are waits for unfinished communication."""
    copies: int
    """Number of micro-batches of the real step that the trace does not run (see `TYPICAL_MICRO_BATCH`)."""
    parameters: int
    """Number of parameters of a rank with this role."""
    padding: int

    @property
    def step(self) -> list[Event]:
        """Events of the step, and of the waits for unfinished communication after it."""
        return self.events[self.step_start :]

    @cached_property
    def actions(self) -> Sequence[Action]:
        """Forward and backward passes that the traced stage ran, in order."""
        layout = self.layout
        return build_schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)[self.role.stage]

    @cached_property
    def pieces(self) -> list[list[Timed]]:
        """Timed events of each forward and backward pass in the order of `actions`, then those of the optimizer."""
        found: list[list[Timed]] = [[] for _ in range(len(self.actions) + 1)]
        at = 0
        append = found[0].append
        for event in self.events[self.step_start : self.step_stop]:
            if type(event) is Alloc or type(event) is Free:
                continue
            if type(event) is Operator or type(event) is Message or type(event) is Wait:
                append(event)
            elif type(event) is PhaseStart and event.position != at:
                # Events of the step before its first forward or backward pass are assigned to this pass.
                at = event.position if event.position >= 0 else len(self.actions) if at else 0
                append = found[at].append
        return found

    @cached_property
    def keys(self) -> dict[int, tuple[object, ...]]:
        """Key of each collective, by its number: pass, operation, group, purpose, order; equal in all micro-batches."""
        keys: dict[int, tuple[object, ...]] = {}
        places: list[tuple[object, ...]] = [(action.kind, action.chunk) for action in self.actions]
        for place, piece in zip([*places, ("tail",)], self.pieces, strict=True):
            seen: Counter[tuple[str, str, str]] = Counter()
            for event in piece:
                if isinstance(event, Message) and event.op != SEND:
                    label = (event.op, event.group, event.purpose)
                    keys[event.work] = (*place, *label, seen[label])
                    seen[label] += 1
        # The traced step follows the initialisation, but other steps follow a step: these all-gathers get equal keys.
        published = [e for e in self.pieces[-1] if isinstance(e, Message) and e.purpose == "parameters"]
        before = [
            e for e in self.events[: self.step_start] if isinstance(e, Message) and e.purpose == "parameters"
        ]
        for old, new in zip(reversed(before), reversed(published), strict=False):
            keys[old.work] = keys[new.work]
        return keys

    def _events_of(self, kind: type[TimedEvent]) -> Iterator[tuple[int, TimedEvent]]:
        """Yield all events of type `kind` in the trace's step, each with its number of repetitions in the real step."""
        weights: list[int] = [
            1 + self.copies * (action.micro_batch == TYPICAL_MICRO_BATCH) for action in self.actions
        ]
        for weight, piece in zip([*weights, 1], self.pieces, strict=True):
            for event in piece:
                if type(event) is kind:
                    yield weight, event

    def operators(self) -> Iterator[tuple[int, Operator]]:
        """Return all operators of the trace's step, each with its number of repetitions in the real step."""
        return self._events_of(Operator)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Return all messages of the trace's step, each with its number of repetitions in the real step."""
        return self._events_of(Message)


def roles(experiment: Experiment) -> list[PipelineRole]:
    """Return the pipeline roles of an experiment, each of which consists of stages with equal layers."""
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
        # Of equal stages, the first has the most micro-batches in flight, and therefore the highest peak of memory.
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
    """Run initialisation and one step of a pipeline role on `meta` tensors, and return the recorded events.

    `gloo`: include the receive buffers of gloo's transport, for comparison with runs on CPUs. `recorder`: unused
    recorder of a subclass that records more than events; it requires `repeat=False`. `repeat`: record one block of each
    kind and repeat its events for other blocks of this kind, which is faster and gives the same events.
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
        # Inputs are the tokens and targets of the step, and on a GPU also of the next (`repro.launch.rank.step_data`).
        shape = 2, experiment.layout.replica_batch, experiment.seq
        inputs = [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(1 if gloo else 2)]
        tokens, targets = inputs[0][:, : layout.micro_batch]
        # In training, this step begins while the preceding step's all-gather of parameters is unfinished.
        for part in engine.parts:
            part.sharded.all_gather_params()
        start = len(recorder.events)
        engine.step([MicroBatch(tokens, targets, BatchPosition(0, 0))] * layout.accumulation, recorder.phase)
        stop = len(recorder.events)
        engine.synchronize()
    # The calls below break reference cycles through hooks and storages, which the garbage collector cannot see.
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
    """Return a trace of one step of `experiment` for each pipeline role."""
    return [trace(experiment, role, gloo=gloo) for role in roles(experiment)]


@cache
def _import_shape_functions() -> None:
    """Import modules that torch's shape functions would import during a trace, where the import would retain tensors.

    `gc.freeze` excludes the imported objects from later garbage collections.
    """
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    gc.freeze()


def shortened(layout: Layout, stage: int) -> Layout:
    """Return `layout` with fewer micro-batches: enough to fill the pipeline, and one that is neither first nor last."""
    m = layout.accumulation
    unit = layout.pp if layout.schedule == "interleaved" else 1
    live = partial(peak_in_flight, layout.schedule, stage, layout.pp, chunks=layout.chunks)
    count = unit
    while count < m and (count < 3 or live(count) < live(m)):
        count += unit
    # At its memory peak, a later stage also retains gradients that it sent in the preceding backward passes.
    count = min(m, count + (max(unit, Boundary.UNDER_WAY) if layout.pp > 1 else unit))
    return replace(layout, global_batch=count * layout.micro_batch * layout.dp)
