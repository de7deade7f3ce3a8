"""Schedule of a step: the streams of all pipeline stages, the messages between them and collectives across stages.

A collective across stages begins when all of them have reached it. A message between stages begins when it is sent and
its receive is posted. A step begins while parameters of the preceding step are still being gathered, and one stage may
begin before another. All ranks agree on the norm of the gradients and update after that, so the events that follow the
last backward pass are scheduled once before the step.

A calibrated file of more ranks than cores holds the seconds of operators while all ranks compute. In the bubble of a
pipeline fewer ranks compute, and the kernel gives them the free share of the cores."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from repro.config import Experiment, Layout
from repro.config.system import System
from repro.parallel.pipeline.schedule import Action, build
from repro.simulate.time.breakdown import NoBreakdown, Span, StageTime
from repro.simulate.time.device import DeviceCost, Kernels, Lanes, SeveralDevices, maximum, maximum_of
from repro.simulate.time.network import Network, SeveralNetworks
from repro.simulate.time.program import Issue, StageProgram, compile_program
from repro.simulate.time.stage import (
    GROUPS_ACROSS_STAGES,
    CoreWork,
    CrossStageCollective,
    MessageKey,
    StageItems,
    StageStreams,
)
from repro.simulate.trace.events import Message
from repro.simulate.trace.roles import Trace


class SharedCores:
    """The cores of a machine, shared evenly by the stages that compute."""

    def __init__(self, ranks_per_core: float, stages: int):
        """`ranks_per_core`: ranks for each core.  A rank uses one core at most, however many are free."""
        self.ranks_per_core, self.stages = ranks_per_core, stages
        self.now = 0.0
        self.works: list[CoreWork] = []

    def add(self, work: CoreWork) -> None:
        """A stage has come to `work`, which begins now or later."""
        self.works.append(work)

    def advance(self) -> list[CoreWork]:
        """Let time pass until the first block ends; what ended then."""
        while True:
            active = [work for work in self.works if work.start <= self.now]
            later = min((work.start for work in self.works if work.start > self.now), default=float("inf"))
            if not active:
                self.now = later
                continue
            speed = min(self.ranks_per_core, self.stages / len(active))
            least = min(work.left for work in active)
            end = self.now + least / speed
            if later < end:
                for work in active:
                    work.left = max(0.0, work.left - (later - self.now) * speed)
                self.now = later
                continue
            ended = [work for work in active if work.left == least]
            for work in active:
                work.left -= least
            for work in ended:
                work.end = end
                self.works.remove(work)
            self.now = end
            return ended


class Transfers(Protocol):
    """What messages between stages cost; see `repro.simulate.time.network.Network`."""

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Of `payload` bytes a rank."""


@dataclass
class Timeline:
    """A scheduled step."""

    step_s: float
    """Seconds of the step, predicted."""
    stages: list[StageTime]
    spans: list[Span]
    unmatched: int
    """Waits for what was never issued; 0 unless something is wrong."""


class PipelineSchedule:
    """All stages, and what is between them."""

    def __init__(
        self,
        layout: Layout,
        programs: Sequence[StageProgram],
        network: Transfers,
        overlap_cost: float,
        ranks_per_core: float,
        record: bool,
        account: type[StageTime],
    ):
        self.layout, self.network, self.overlap_cost = layout, network, overlap_cost
        self.account = account
        self.ranks_per_core = ranks_per_core if layout.pp > 1 else 1.0
        self.schedule = build(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
        self._arrivals: dict[MessageKey, tuple[float, float]] = {}
        self._asked: set[MessageKey] = set()
        """Messages that one of their two ends knows to have arrived."""
        self._posts: dict[MessageKey, float] = {}
        self._sends: dict[MessageKey, tuple[float, float]] = {}
        self._free: dict[tuple[int, int, int], float] = defaultdict(float)
        self._meetings: dict[tuple[object, ...], deque[CrossStageCollective]] = defaultdict(deque)
        used = {id(program): _groups(program) for program in programs}
        self._members = {
            group: {stage for stage, program in enumerate(programs) if group in used[id(program)]}
            for group in GROUPS_ACROSS_STAGES
        }
        self.woken: list[object] = []
        self.stretches: dict[int, StageItems] = {}
        self.stages = [
            StageStreams(self, stage, program, record=record) for stage, program in enumerate(programs)
        ]

    def run(self) -> None:
        """The step of all stages."""
        waiting: dict[object, list[Generator[object, None, None]]] = defaultdict(list)
        ready = [stage.run() for stage in self.stages]
        cores = SharedCores(self.ranks_per_core, self.layout.pp)
        while ready or cores.works:
            if ready:
                stage = ready.pop()
                for wanted in stage:
                    if isinstance(wanted, CoreWork):
                        cores.add(wanted)
                    waiting[wanted].append(stage)
                    break
            else:
                self.woken.extend(cores.advance())
            for known in self.woken:
                ready.extend(waiting.pop(known, ()))
            self.woken.clear()
        assert not any(waiting.values()), "stages wait for each other for ever"

    def actions(self, stage: int) -> Sequence[Action]:
        """Of a step of `stage`, in order."""
        return self.schedule[stage]

    def post(self, key: MessageKey, now: float) -> None:
        """A receive is posted."""
        self._posts[key] = now
        self._match(key)

    def seconds(self, key: MessageKey, payload: int) -> float:
        """Of a message of `payload` bytes a rank."""
        return self.network.send_seconds(payload, from_stage=key[0], to_stage=key[1])

    def send(self, key: MessageKey, seconds: float, now: float) -> None:
        """A message is sent that takes `seconds`."""
        self._sends[key] = (now, seconds)
        self._match(key)

    def _match(self, key: MessageKey) -> None:
        if key in self._posts and key in self._sends:
            now, seconds = self._sends.pop(key)
            start = maximum(maximum(now, self._posts.pop(key)), self._free[key[:3]])
            self._free[key[:3]] = start + seconds
            self._arrivals[key] = (start, start + seconds)
            self.woken.append(key)

    def has_arrived(self, key: MessageKey) -> bool:
        """Whether it is known when a message arrives."""
        return key in self._arrivals

    def arrival(self, key: MessageKey) -> tuple[float, float]:
        """When it began to arrive, and when it was there; told to each of its two ends once."""
        if key in self._asked:
            self._asked.remove(key)
            return self._arrivals.pop(key)
        self._asked.add(key)
        return self._arrivals[key]

    def meet(self, item: Issue, stage: int, ready: float) -> CrossStageCollective:
        """`stage` has come to a collective of several stages."""
        open_ = self._meetings[item.group, item.label]
        meeting = next((m for m in open_ if stage not in m.ready), None)
        if meeting is None:
            meeting = CrossStageCollective()
            open_.append(meeting)
        meeting.ready[stage] = ready
        if len(meeting.ready) == len(self._members[item.group]):
            meeting.end = maximum_of(meeting.ready.values()) + item.seconds
            open_.remove(meeting)
            self.woken.append(meeting)
        return meeting


def _groups(program: StageProgram) -> set[str]:
    """Of its collectives."""
    pieces = {id(piece): piece for piece in (*program.segments.values(), program.tail)}
    return {item.group for piece in pieces.values() for item in piece if isinstance(item, Issue)}


def schedule(
    layout: Layout,
    programs: Sequence[StageProgram],
    network: Transfers,
    *,
    overlap_cost: float = 0.0,
    ranks_per_core: float = 1.0,
    record: bool = False,
    account: type[StageTime] = StageTime,
) -> Timeline:
    """Schedule a step of `layout` whose stage s runs `programs[s]`.

    `ranks_per_core`: ranks for each core that they shared when operators were measured, all of them at once.
    `account`: `OnlyTheEnd` for the seconds of the step and nothing else.
    """
    everything = PipelineSchedule(layout, programs, network, overlap_cost, ranks_per_core, record, account)
    everything.run()
    stages = everything.stages
    step_s = maximum_of(stage.now for stage in stages) - maximum_of(stage.began for stage in stages)
    spans = [span for stage in stages for span in stage.spans]
    return Timeline(step_s, [stage.time for stage in stages], spans, sum(stage.unmatched for stage in stages))


def schedule_traces(
    experiment: Experiment, system: System, traces: list[Trace], kernels: Kernels, *, record: bool = False
) -> Timeline:
    """When a step's events happen.

    `traces` of all its roles.  `kernels`: of the layout's generation.
    `record`: keep every span, for a drawing.
    """
    layout = experiment.layout
    cost = DeviceCost(system, layout.precision, kernels, layout.world)
    network = Network(system, layout)
    return _schedule_programs(experiment, traces, cost, network, system.ranks_per_core, record)


def step_seconds(
    experiment: Experiment, systems: Sequence[System], traces: list[Trace], kernels: Sequence[Kernels]
) -> Lanes:
    """The seconds of a step on each of `systems` with the kernels beside it, [systems], in one pass.

    They differ in the values of their unknowns alone (`repro.config.systems.unknowns`).
    """
    layout = experiment.layout
    cost = SeveralDevices(systems, layout.precision, kernels, layout.world)
    network = SeveralNetworks(systems, layout)
    ranks_per_core = systems[0].ranks_per_core
    found = _schedule_programs(experiment, traces, cost, network, ranks_per_core, account=NoBreakdown)
    return network.lanes(found.step_s)


def _schedule_programs(
    experiment: Experiment,
    traces: list[Trace],
    cost: DeviceCost,
    network: Network | SeveralNetworks,
    ranks_per_core: float,
    record: bool = False,
    account: type[StageTime] = StageTime,
) -> Timeline:
    layout = experiment.layout

    def seconds(message: Message) -> float:
        return network.seconds(message.op, message.group, message.payload)

    programs = [
        compile_program(traced, layout.accumulation, cost, seconds, network.messages) for traced in traces
    ]
    return schedule(
        layout,
        [programs[number] for number in _trace_of_each_stage(experiment, traces)],
        network,
        overlap_cost=network.overlap_cost,
        ranks_per_core=ranks_per_core,
        record=record,
        account=account,
    )


def _trace_of_each_stage(experiment: Experiment, traces: list[Trace]) -> list[int]:
    """Which of `traces` each stage runs."""
    layout = experiment.layout
    parts = layout.parts(experiment.model.layers)

    def kind(stage: int) -> tuple[bool, bool, tuple[int, ...]]:
        sizes = tuple(len(part) for part in parts[stage :: layout.pp])
        return stage == 0, stage == layout.pp - 1, sizes

    known = {kind(traced.role.stage): number for number, traced in enumerate(traces)}
    return [known[kind(stage)] for stage in range(layout.pp)]
