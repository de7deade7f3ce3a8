"""Schedule the traces of a step's roles on a system, or on several at once, with kernels of a given efficiency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from repro.config import Experiment
from repro.config.system import System
from repro.simulate.time.account import OnlyTheEnd, StageTime
from repro.simulate.time.device import DeviceCost, Kernels
from repro.simulate.time.lanes import Lanes
from repro.simulate.time.network import Network
from repro.simulate.time.program import OperatorCost, program
from repro.simulate.time.schedule import Timeline, Transfers, schedule
from repro.simulate.time.several import SeveralDevices, SeveralNetworks
from repro.simulate.trace.events import Message
from repro.simulate.trace.roles import Trace


class Links(Transfers, Protocol):
    """`repro.simulate.time.network.Network`, or several."""

    @property
    def overlap_cost(self) -> float:
        """Fraction of a hidden collective's seconds that compute loses meanwhile."""

    @property
    def seconds(self) -> Callable[[str, str, int], float]:
        """Of an operation in a group with a payload in bytes."""

    def messages(self, op: str, group: str) -> int:
        """Of which it is made, of a rank's own thread."""


def timed(
    experiment: Experiment, system: System, traces: list[Trace], kernels: Kernels, *, record: bool = False
) -> Timeline:
    """When a step's events happen.

    `traces` of all its roles.  `kernels`: of the layout's generation.
    `record`: keep every span, for a drawing.
    """
    layout = experiment.layout
    cost = DeviceCost(system, layout.precision, kernels, layout.world)
    network = Network(system, layout)
    return _scheduled(experiment, traces, cost, network, system.ranks_per_core, record)


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
    found = _scheduled(experiment, traces, cost, network, ranks_per_core, account=OnlyTheEnd)
    return network.lanes(found.step_s)


def _scheduled(
    experiment: Experiment,
    traces: list[Trace],
    cost: OperatorCost,
    network: Links,
    ranks_per_core: float,
    record: bool = False,
    account: type[StageTime] = StageTime,
) -> Timeline:
    layout = experiment.layout

    def seconds(message: Message) -> float:
        return network.seconds(message.op, message.group, message.payload)

    programs = [program(traced, layout.accumulation, cost, seconds, network.messages) for traced in traces]
    return schedule(
        layout,
        [programs[number] for number in _stages(experiment, traces)],
        network,
        overlap_cost=network.overlap_cost,
        ranks_per_core=ranks_per_core,
        record=record,
        account=account,
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
