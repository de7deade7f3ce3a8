"""Schedule the traces of a step's roles on a system, with kernels of a given efficiency."""

from __future__ import annotations

from repro.config import Experiment
from repro.config.system import System
from repro.simulate.time.device import DeviceCost
from repro.simulate.time.network import Network
from repro.simulate.time.program import program
from repro.simulate.time.schedule import Timeline, schedule
from repro.simulate.trace.events import Message
from repro.simulate.trace.roles import Trace


def timed(
    experiment: Experiment, system: System, traces: list[Trace], factor: float, *, record: bool = False
) -> Timeline:
    """When a step's events happen.

    `traces` of all its roles.  `factor`: what kernels take over what the model of the device says.
    `record`: keep every span, for a drawing.
    """
    layout = experiment.layout
    cost = DeviceCost(system, layout.precision, factor)
    network = Network(system, layout)

    def seconds(message: Message) -> float:
        return network.seconds(message.op, message.group, message.payload)

    programs = [program(traced, layout.accumulation, cost, seconds) for traced in traces]
    return schedule(
        layout,
        [programs[number] for number in _stages(experiment, traces)],
        network,
        overlap_cost=network.overlap_cost,
        oversubscription=system.oversubscription,
        record=record,
    )


def _stages(experiment: Experiment, traces: list[Trace]) -> list[int]:
    """Which of `traces` each stage runs."""
    layout = experiment.layout
    parts = layout.parts(experiment.model.layers)

    def kind(stage: int) -> tuple[bool, bool, tuple[int, ...]]:
        sizes = tuple(len(part) for part in parts[stage :: layout.pp])
        return stage == 0, stage == layout.pp - 1, sizes

    known = {kind(traced.role.stage): number for number, traced in enumerate(traces)}
    return [known[kind(stage)] for stage in range(layout.pp)]
