"""Step time extrapolated linearly from small schedules of a family's shallow traces.

In a pipeline of equal stages, each further micro-batch adds one turn of the slowest stage. Each further stage adds one
forward and one backward pass, and each further layer lengthens both. A few stages, micro-batches and layers are
scheduled on the links of the full layout. The step time is a line through these schedules, T = T0 + (m - m0) dT/dm + (p
- p0) dT/dp, at two depths each. A micro-batch's operators are interpolated between the narrowest and the widest trace.
The error against the full schedule is a few percent (tests/simulate/test_steptime.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from repro.config import Experiment, Layout, Model, Training
from repro.config.errors import ConfigError
from repro.config.system import System
from repro.config.systems.unknowns import drawn, quantiles_in_cases
from repro.model import counts
from repro.parallel.pipeline.schedule import FORWARD, Action
from repro.results.interval import StepInterval
from repro.simulate.plan.closed_form import ALL, FIRST, LAST, MIDDLE
from repro.simulate.plan.extrapolation.linear import widen_traces
from repro.simulate.plan.extrapolation.lower_bound import SystemRates, network_layout
from repro.simulate.plan.extrapolation.shallow_traces import LayoutFamily
from repro.simulate.time import calibration
from repro.simulate.time.breakdown import NoBreakdown, StageTime
from repro.simulate.time.calibration import prediction_basis, uncertain_numbers
from repro.simulate.time.device import MODELLED_KERNELS, DeviceCost
from repro.simulate.time.network import Network
from repro.simulate.time.predict import Prediction, interval_of_seconds, kernels_in_cases
from repro.simulate.time.program import StageProgram, compile_program
from repro.simulate.time.schedule import Timeline, schedule
from repro.simulate.trace.events import Event, Message, Operator, PhaseStart
from repro.simulate.trace.roles import TYPICAL_MICRO_BATCH, Trace
from repro.util.processes import pause_garbage_collection

SCHEDULED_STAGES = 4
"""Number of scheduled stages for a deeper pipeline, which is also scheduled with one more stage."""
ScheduleSize = tuple[int, int]
"""Stages and micro-batches of a schedule."""


class StepTimes:
    """Step times of layouts of one model and system, with caches that the layouts share."""

    def __init__(self, model: Model, seq: int, system: System):
        self.model, self.seq, self.system, self.rates = model, seq, system, SystemRates(system)
        self._widened: dict[tuple[str, int], tuple[Trace, Trace]] = {}
        """Widened traces of the last family, with few and with more layers, by role and samples."""

    def family(
        self, layouts: Sequence[Layout], families: dict[str, LayoutFamily]
    ) -> list[dict[str, Any] | str]:
        """Return `of_layout` for each of the `layouts` of one family, or the missing number of the system."""
        found: list[dict[str, Any] | str] = []
        self.forget()
        for layout in layouts:
            try:
                found.append(self.of_layout(layout, families))
            except ConfigError as error:
                found.append(str(error))
        return found

    def forget(self) -> None:
        """Clear the cache of a family's layouts, before another family."""
        self._widened.clear()

    def of_layout(self, layout: Layout, families: dict[str, LayoutFamily]) -> dict[str, Any]:
        """Return the step as `repro.simulate.time.predict.Prediction.as_dict`; `ConfigError` if numbers are missing."""
        cost = self.rates.cost(layout)
        found = [
            (weight, self._document(layout, point, timeline))
            for weight, point, timeline in self._timelines(layout, families, cost, self.rates.network(layout))
        ]
        return self._sum(layout, found)

    def interval(
        self, layout: Layout, families: dict[str, LayoutFamily], step_s: float
    ) -> StepInterval | None:
        """Return the interval of a step time `step_s`; None without unknowns. Raises `ConfigError` as `of_layout`."""
        generation = calibration.calibration_point_of(layout.kernels, self.system)
        found = tuple(uncertain_numbers(self.system, generation))
        if not found:
            return None
        system = drawn(self.system, quantiles_in_cases(found))
        cost = DeviceCost(system, layout.precision, kernels_in_cases(generation, found), layout.world)
        best, seconds = (
            sum(
                weight * timeline.step_s
                for weight, _, timeline in self._timelines(layout, families, *of, NoBreakdown)
            )
            for of in (
                (self.rates.cost(layout), self.rates.network(layout)),
                (cost, Network(system, network_layout(layout))),
            )
        )
        return interval_of_seconds(found, seconds * (step_s / best))

    def _timelines(
        self,
        layout: Layout,
        families: dict[str, LayoutFamily],
        cost: DeviceCost,
        network: Network,
        account: type[StageTime] = StageTime,
    ) -> Iterator[tuple[float, ScheduleSize, Timeline]]:
        """Yield the small schedules whose weighted sum is the step: the weight, size and timeline of each."""
        layers = self.model.layers // (layout.pp * layout.chunks)
        base = next(iter(families.values()))
        few, many = base.base.layers, base.deeper.layers
        part = (layers - few) / (many - few)
        for deep, weight in ((False, 1 - part), (True, part)):
            if weight:
                programs = self._programs(layout, families, deep, cost, network)
                for point, share in schedule_points(layout).items():
                    yield weight * share, point, self._scheduled(layout, point, programs, network, account)

    def _programs(
        self,
        layout: Layout,
        families: dict[str, LayoutFamily],
        deep: bool,
        cost: DeviceCost,
        network: Network,
    ) -> dict[str, StageProgram]:
        found = {}
        for name, family in families.items():
            if name == MIDDLE and layout.pp < 3:
                continue
            key = name, layout.micro_batch
            if key not in self._widened:
                self._widened[key] = widen_traces(family, layout.micro_batch)
            traced = self._widened[key][deep]
            shards = family.base.layout.dp / layout.dp if layout.zero else 1.0
            traced = replace(traced, events=list(_resharded(traced.events, shards)))
            seconds = _seconds(network, layout, shards)
            found[name] = compile_program(traced, traced.layout.accumulation, cost, seconds, network.messages)
        return found

    def _scheduled(
        self,
        layout: Layout,
        point: ScheduleSize,
        programs: dict[str, StageProgram],
        network: Network,
        account: type[StageTime],
    ) -> Timeline:
        stages, micro_batches = point
        small = _resized(layout, stages, micro_batches)
        names = _stage_roles(stages)
        by_name = {name: _program_for(programs[name], micro_batches) for name in dict.fromkeys(names)}
        return schedule(
            small,
            [by_name[name] for name in names],
            network if stages == layout.pp else _MeanStageEdges(network, stages),
            overlap_cost=network.overlap_cost,
            ranks_per_core=self.system.ranks_per_core,
            account=account,
        )

    def _document(self, layout: Layout, point: ScheduleSize, timeline: Timeline) -> dict[str, Any]:
        stages, micro_batches = point
        small = _resized(layout, stages, micro_batches)
        sizes = replace(self.model, layers=stages * layout.chunks)
        experiment = Experiment(
            name="shallow",
            model=sizes,
            layout=small,
            training=Training(seq=self.seq),
            system=self.system.name,
        )
        return Prediction(experiment, self.system, timeline, [], None, MODELLED_KERNELS).as_dict()

    def _sum(self, layout: Layout, parts: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
        found: dict[str, Any] = dict(parts[0][1])
        for key, first in parts[0][1].items():
            if isinstance(first, dict):
                sums: dict[str, float] = defaultdict(float)
                for weight, part in parts:
                    for name, value in part[key].items():
                        sums[name] += weight * value
                found[key] = {name: max(0.0, value) for name, value in sums.items()}
            elif key.endswith("_s"):
                found[key] = max(0.0, sum(weight * part[key] for weight, part in parts))
        work = counts.hardware_flops(self.model, self.seq, layout.global_batch, layout.recompute)
        generation = calibration.calibration_point_of(layout.kernels, self.system)
        found["samples_per_s"] = layout.global_batch / found["step_s"]
        found["flops_per_device"] = work / found["step_s"] / layout.world
        rate = counts.model_flops(self.model, self.seq, layout.global_batch) / found["step_s"]
        found["mfu"] = counts.utilisation(rate, layout.world, self.system, layout.precision)
        found["rests_on"] = prediction_basis(layout.kernels, self.system)
        found["generation"] = generation.name if generation is not None else ""
        kernels = self.rates.cost(layout).kernels
        found["factor"], found["product_factor"] = kernels.others, kernels.products
        return found


@pause_garbage_collection()
def times_of(
    model: Model,
    seq: int,
    system: System,
    families: Sequence[tuple[Sequence[Layout], dict[str, LayoutFamily]]],
) -> list[list[dict[str, Any] | str]]:
    """Return `StepTimes.family` of several families, which share their networks; runs in a worker."""
    times = StepTimes(model, seq, system)
    return [times.family(layouts, traced) for layouts, traced in families]


@pause_garbage_collection()
def intervals_of(
    model: Model,
    seq: int,
    system: System,
    requests: Sequence[tuple[Layout, dict[str, LayoutFamily], float]],
) -> list[StepInterval | None]:
    """Return `StepTimes.interval` of layouts of any family with their step times in seconds; runs in a worker."""
    times, found = StepTimes(model, seq, system), []
    for layout, families, step_s in requests:
        times.forget()
        found.append(times.interval(layout, families, step_s))
    return found


def schedule_points(layout: Layout) -> dict[ScheduleSize, float]:
    """Return the sizes of the small schedules from which `layout`'s follows, and their weights in the sum."""
    pp, m = layout.pp, layout.accumulation
    if pp > SCHEDULED_STAGES + 1:
        few, more = (SCHEDULED_STAGES, 2 * SCHEDULED_STAGES), (SCHEDULED_STAGES, 3 * SCHEDULED_STAGES)
        longer = SCHEDULED_STAGES + 1, 2 * (SCHEDULED_STAGES + 1)
        turns = (m - few[1]) / (more[1] - few[1])
        stages = float(pp - SCHEDULED_STAGES)
        turns -= stages * (longer[1] - few[1]) / (more[1] - few[1])  # `longer` has more micro-batches as well
        return {few: 1 - turns - stages, more: turns, longer: stages}
    few, more = (pp, max(3, 2 * pp)), (pp, max(3, 2 * pp) + pp)
    if m <= more[1]:
        return {(pp, m): 1.0}
    turns = (m - few[1]) / (more[1] - few[1])
    return {few: 1 - turns, more: turns}


def _stage_roles(stages: int) -> list[str]:
    return [ALL] if stages == 1 else [FIRST, *[MIDDLE] * (stages - 2), LAST]


def _resized(layout: Layout, stages: int, micro_batches: int) -> Layout:
    """Return `layout` with another number of stages and micro-batches."""
    batch = micro_batches * layout.micro_batch * layout.dp
    return replace(layout, pp=stages, global_batch=batch, stage_layers=())


def _program_for(traced: StageProgram, micro_batches: int) -> StageProgram:
    """Return the program for another number of micro-batches, from the first, ordinary and last one of `traced`."""
    last = traced.micro_batches - 1
    segments = {}
    for action in traced.segments:
        if action.micro_batch == 0:
            for i in range(micro_batches):
                shown = 0 if i == 0 else last if i == micro_batches - 1 else TYPICAL_MICRO_BATCH
                if micro_batches == 1 and action.kind != FORWARD:  # first and last in one: the last one sends
                    shown = last
                segments[Action(action.kind, i, action.chunk)] = traced.segments[
                    Action(action.kind, shown, action.chunk)
                ]
    return StageProgram(segments, traced.tail, micro_batches, micro_batches - 1)


class _MeanStageEdges:
    """Messages between the stages of a shortened pipeline, with the mean time of neighbours in the full pipeline."""

    def __init__(self, network: Network, stages: int):
        self.network, self.last, self.known = network, stages - 1, dict[tuple[int, int], float]()
        nodes = network.system.devices_per_node.value or 1
        self.edges = range(min(network.layout.pp - 1, int(nodes)))  # further edges repeat these
        """First stages of the edges between neighbours."""

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Return `Network.send_seconds` between two stages of a shortened pipeline."""
        step = to_stage - from_stage
        if (payload, step) not in self.known:
            edges = [(stage, stage + 1) if step > 0 else (stage + 1, stage) for stage in self.edges]
            if abs(step) == self.last:  # between last and first
                ends = (0, self.network.layout.pp - 1)
                edges = [ends if step > 0 else ends[::-1]]
            self.known[payload, step] = sum(
                self.network.send_seconds(payload, from_stage=one, to_stage=other) for one, other in edges
            ) / len(edges)
        return self.known[payload, step]


def _seconds(network: Network, layout: Layout, shards: float) -> Callable[[Message], float]:
    def seconds(message: Message) -> float:
        payload = message.payload
        if message.group == "embedding" and layout.zero:  # shards of the tied gradients
            payload = round(payload * shards)
        return network.seconds(message.op, message.group, payload)

    return seconds


def _resharded(events: Sequence[Event], shards: float) -> Iterator[Event]:
    """Yield the events, with the bytes of the optimizer's operators scaled by `shards`."""
    tail = False
    for event in events:
        if isinstance(event, PhaseStart):
            tail = event.name == "optimizer"
        if tail and shards != 1 and isinstance(event, Operator):
            event = event._replace(read=round(event.read * shards), written=round(event.written * shards))
        yield event
