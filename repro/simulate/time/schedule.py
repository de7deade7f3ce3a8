"""Schedule of a step: the streams of all pipeline stages, the messages between them and collectives across stages.

A step begins while the preceding step still gathers parameters, so the update is also scheduled once before the step.
If a machine has more ranks than cores, ranks that compute share the cores of ranks that wait in the pipeline bubble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from repro.config import Experiment, Layout
from repro.config.engines import capture_obstacle
from repro.config.system import System
from repro.simulate.time.breakdown import Span, StageTime
from repro.simulate.time.cross_stage import CoreWork, CrossStageState, SharedCores, Transfers
from repro.simulate.time.device import DeviceCost, Kernels, first_lane, maximum_of
from repro.simulate.time.network import Network
from repro.simulate.time.program import StageProgram, compile_program
from repro.simulate.time.recurrence import ActionTimes, run_actions
from repro.simulate.time.stage import StageStreams
from repro.simulate.time.steady_state import shorter_counts
from repro.simulate.trace.events import Message
from repro.simulate.trace.roles import Trace


@dataclass
class Timeline:
    """Predicted times of a step, from the schedule of all its pipeline stages."""

    seconds: float
    """Predicted seconds of the step; an array over sampled cases if the system's uncertain inputs are such arrays."""
    stages: list[StageTime]
    """Breakdown of the step time of each pipeline stage."""
    spans: list[Span]
    """Busy intervals of all streams of all pipeline stages; empty unless they are recorded."""
    unmatched: int
    """Number of waits for collectives that were never issued; 0 in a correct schedule."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of the step at the best values of all uncertain inputs."""
        return first_lane(self.seconds)


def _run_stages(runs: Sequence[Generator[object, None, None]], state: CrossStageState) -> None:
    """Simulate all stages concurrently. A stage pauses until the end of its message or collective is known."""
    waiting: dict[object, list[Generator[object, None, None]]] = defaultdict(list)
    ready = list(runs)
    cores = SharedCores(state.ranks_per_core, len(runs))
    while ready or cores.works:
        if ready:
            stage = ready.pop()
            for wanted in stage:
                if isinstance(wanted, CoreWork):
                    cores.add(wanted)
                waiting[wanted].append(stage)
                break
        else:
            state.woken.extend(cores.advance())
        for known in state.woken:
            ready.extend(waiting.pop(known, ()))
        state.woken.clear()
    assert not any(waiting.values()), "deadlock: every pipeline stage waits for another one"


def schedule(
    layout: Layout,
    programs: Sequence[StageProgram],
    network: Transfers,
    *,
    overlap_cost: float = 0.0,
    ranks_per_core: float = 1.0,
    record: bool = False,
) -> Timeline:
    """Schedule a step of `layout` in which pipeline stage s runs `programs[s]`.

    `overlap_cost`: seconds that compute loses per second of a concurrent collective, 0 to 1. `ranks_per_core`: ranks
    per CPU core in the measurement of operators, in which all ranks compute. `record`: schedule all items of all
    micro-batches one by one, and store the busy intervals of all streams; the times are the same.
    """
    by_events = record or (ranks_per_core > 1 and layout.pp > 1)

    def scheduled(count: int, compare: bool = False) -> tuple[Timeline, ActionTimes | None]:
        """Schedule a step of `count` micro-batches. `compare`: store the times that a search for a cycle compares."""
        short = replace(layout, global_batch=count * layout.micro_batch * layout.dp)
        state = CrossStageState(short, programs, network, overlap_cost, ranks_per_core)
        stages = [
            StageStreams(state, stage, program, record=record) for stage, program in enumerate(programs)
        ]
        _run_stages([stage.begin() for stage in stages], state)
        times = None if by_events else run_actions(stages, short, compare=compare)
        if times is None:
            _run_stages([stage.run_events() for stage in stages], state)
        _run_stages([stage.finish() for stage in stages], state)
        seconds = maximum_of(stage.now for stage in stages) - maximum_of(stage.began for stage in stages)
        spans = [span for stage in stages for span in stage.spans]
        unmatched = sum(stage.unmatched for stage in stages)
        return Timeline(seconds, [stage.time for stage in stages], spans, unmatched), times

    if by_events:
        return scheduled(layout.accumulation)[0]
    least = 1 + max(program.micro_batches for program in programs)
    for count in shorter_counts(layout, least):
        found, times = scheduled(count, compare=True)
        if times is None or times.samples is None:
            break
        if (cycle := times.samples.cycle()) is None:
            continue
        further, rest = divmod(layout.accumulation - count, cycle.micro_batches)
        if rest:
            found = scheduled(count + rest)[0]
        for number, stage in enumerate(found.stages):
            stage.add(times.cycle_time(cycle, number), further)
        return replace(found, seconds=found.seconds + further * cycle.seconds)
    return scheduled(layout.accumulation)[0]


def schedule_traces(
    experiment: Experiment, system: System, traces: list[Trace], kernels: Kernels, *, record: bool = False
) -> Timeline:
    """Return a step's schedule from the `traces` of all pipeline roles. `record`: store busy intervals to draw."""
    layout = experiment.layout
    cost, network = DeviceCost(system, layout.precision, kernels, layout.world), Network(system, layout)

    def seconds(message: Message) -> float:
        return network.seconds(message.op, message.group, message.payload)

    captured = layout.cuda_graphs and not capture_obstacle(layout, experiment.training)
    programs = [
        compile_program(
            traced, layout.accumulation, cost, seconds, network.messages, captured=captured, record=record
        )
        for traced in traces
    ]
    return schedule(
        layout,
        [programs[number] for number in _trace_of_each_stage(experiment, traces)],
        network,
        overlap_cost=network.overlap_cost,
        ranks_per_core=system.ranks_per_core,
        record=record,
    )


def _trace_of_each_stage(experiment: Experiment, traces: list[Trace]) -> list[int]:
    """Return, for each pipeline stage, the index in `traces` of the trace of its role."""
    layout = experiment.layout
    parts = layout.parts(experiment.model.layers)

    def kind(stage: int) -> tuple[bool, bool, tuple[int, ...]]:
        sizes = tuple(len(part) for part in parts[stage :: layout.pp])
        return stage == 0, stage == layout.pp - 1, sizes

    known = {kind(traced.role.stage): number for number, traced in enumerate(traces)}
    return [known[kind(stage)] for stage in range(layout.pp)]
