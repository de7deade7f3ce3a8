"""Schedule of a step: the streams of all pipeline stages, the messages between them and collectives across stages.

A collective across stages begins when all of them have reached it. A message between stages begins when it is sent and
its receive is posted. A step begins while parameters of the preceding step are still being gathered, and one stage may
begin before another. All ranks agree on the norm of the gradients and then update. The events that follow the
last backward pass are therefore scheduled once before the step.

A calibrated file of more ranks than cores holds the seconds of operators while all ranks compute. In the bubble of a
pipeline fewer ranks compute, and the kernel gives them the free share of the cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from repro.config import Experiment, Layout
from repro.config.engines import capture_obstacle
from repro.config.system import System
from repro.simulate.time.breakdown import NoBreakdown, Span, StageTime
from repro.simulate.time.cross_stage import CoreWork, CrossStageState, SharedCores, Transfers
from repro.simulate.time.device import DeviceCost, Kernels, Lanes, SeveralDevices, maximum_of
from repro.simulate.time.network import Network, SeveralNetworks
from repro.simulate.time.program import StageProgram, compile_program
from repro.simulate.time.stage import StageStreams
from repro.simulate.time.steady_state import (
    Times,
    compared_positions,
    find_cycle,
    shorter_layouts,
    with_micro_batches,
)
from repro.simulate.trace.events import Message
from repro.simulate.trace.roles import Trace


@dataclass
class Timeline:
    """A scheduled step."""

    step_s: float
    """Seconds of the step, predicted."""
    stages: list[StageTime]
    spans: list[Span]
    unmatched: int
    """Number of waits for collectives that were never issued; 0 in a correct schedule."""


def _run_stages(stages: Sequence[StageStreams], state: CrossStageState) -> None:
    """Run the step of all stages."""
    waiting: dict[object, list[Generator[object, None, None]]] = defaultdict(list)
    ready = [stage.run() for stage in stages]
    cores = SharedCores(state.ranks_per_core, len(stages))
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
    assert not any(waiting.values()), "stages wait for each other for ever"


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
    """Schedule a step of `layout` in which stage s runs `programs[s]`.

    `ranks_per_core`: ranks per core while operators were measured, all at once. `account`: `NoBreakdown` computes only
    the step time.
    """
    options = network, overlap_cost, ranks_per_core, account
    if record or ranks_per_core > 1:
        return _scheduled(layout, programs, *options, record=record)[0]
    least = 1 + max(program.micro_batches for program in programs)
    for short in shorter_layouts(layout, least):
        found, times = _scheduled(short, programs, *options, compared=True)
        if (cycle := find_cycle(short, times)) is None:
            continue
        further, rest = divmod(layout.accumulation - short.accumulation, cycle.micro_batches)
        count = short.accumulation + rest
        if rest:
            found, _ = _scheduled(with_micro_batches(layout, count), programs, *options)
        if account is not NoBreakdown:
            longer = with_micro_batches(layout, count + cycle.micro_batches)
            for stage, other in zip(
                found.stages, _scheduled(longer, programs, *options)[0].stages, strict=True
            ):
                stage.extrapolate(other, further)
        return replace(found, step_s=found.step_s + further * cycle.seconds)
    return _scheduled(layout, programs, *options)[0]


def _scheduled(
    layout: Layout,
    programs: Sequence[StageProgram],
    network: Transfers,
    overlap_cost: float,
    ranks_per_core: float,
    account: type[StageTime],
    *,
    record: bool = False,
    compared: bool = False,
) -> tuple[Timeline, list[list[Times]]]:
    """Schedule every micro-batch of `layout`. Return the step, and with `compared` the times of the last periods."""
    state = CrossStageState(layout, programs, network, overlap_cost, ranks_per_core, account)
    stages = [StageStreams(state, stage, program, record=record) for stage, program in enumerate(programs)]
    if compared:
        for stage in stages:
            stage.compared = compared_positions(layout, state.schedule, stage.stage)
    _run_stages(stages, state)
    step_s = maximum_of(stage.now for stage in stages) - maximum_of(stage.began for stage in stages)
    spans = [span for stage in stages for span in stage.spans]
    unmatched = sum(stage.unmatched for stage in stages)
    return Timeline(step_s, [stage.time for stage in stages], spans, unmatched), [
        stage.times for stage in stages
    ]


def schedule_traces(
    experiment: Experiment, system: System, traces: list[Trace], kernels: Kernels, *, record: bool = False
) -> Timeline:
    """Return the schedule of a step.

    `traces` of all its roles. `kernels`: those of the layout's generation. `record`: store every span, for a drawing.
    """
    layout = experiment.layout
    cost = DeviceCost(system, layout.precision, kernels, layout.world)
    network = Network(system, layout)
    return _schedule_programs(experiment, traces, cost, network, system.ranks_per_core, record)


def scheduled_step_seconds(
    experiment: Experiment, systems: Sequence[System], traces: list[Trace], kernels: Sequence[Kernels]
) -> Lanes:
    """Return the step time in seconds on each of `systems` with the corresponding `kernels`, [systems], in one pass.

    The systems differ only in the values of their unknowns (`repro.config.systems.unknowns`).
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

    captured = layout.cuda_graphs and not capture_obstacle(layout, experiment.training)
    programs = [
        compile_program(traced, layout.accumulation, cost, seconds, network.messages, captured=captured)
        for traced in traces
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
    """Return the index in `traces` of the trace of each stage."""
    layout = experiment.layout
    parts = layout.parts(experiment.model.layers)

    def kind(stage: int) -> tuple[bool, bool, tuple[int, ...]]:
        sizes = tuple(len(part) for part in parts[stage :: layout.pp])
        return stage == 0, stage == layout.pp - 1, sizes

    known = {kind(traced.role.stage): number for number, traced in enumerate(traces)}
    return [known[kind(stage)] for stage in range(layout.pp)]
