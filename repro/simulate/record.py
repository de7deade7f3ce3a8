"""Record of a simulated step, with the field names of a measured record where the meaning is equal.

Memory is the maximum over pipeline roles (stages with equal layers); communication is that of the first stage. The
record of an out-of-memory step has live bytes, no reserved bytes, and the allocator's state at the failed request.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from repro.config import Experiment, OperatorSet, models, systems
from repro.config.system import System
from repro.model import counts
from repro.results import metrics
from repro.results.metrics import Held, Metrics
from repro.results.record_parts import SimulatedFailure, SimulatedOn, SimulatedRole, StepSeries
from repro.results.schema import SIMULATED, ExperimentRecord

if TYPE_CHECKING:
    from repro.simulate.step import RoleResult, Simulation

SIMULATOR_REVISION = 4
"""Revision of the simulator's formulas for memory and time; a new formula that changes results must raise it."""


def simulated_record(
    experiment: Experiment, simulation: Simulation, system: System, *, suite: str, wall_s: float
) -> ExperimentRecord:
    """Return the record of one simulated experiment with the outcome `ok` or `oom`, without provenance."""
    roles = simulation.roles
    traffic = [role.traffic for role in roles]
    per_layer = metrics.per_layer(experiment, roles[0].role.stage, traffic[0])
    usage = [_held(role) for role in roles]
    fits = simulation.outcome == "ok"
    fullest = simulation.fullest.replay
    found: Metrics = {
        "parameters": roles[0].parameters,
        "padding": simulation.traces[0].padding,
        **metrics.memory(usage),
        **metrics.allocated(
            usage,
            context=simulation.context_bytes,
            limit=simulation.limit_bytes,
            reserved=fullest.peak_reserved if fits else None,
            fragmentation=fullest.fragmentation,
            retries=max(role.replay.retries for role in roles),
        ),
        **metrics.communication(traffic[0], per_layer),
        **metrics.purposes(zip((_ranks(experiment, role) for role in roles), traffic, strict=True)),
        **metrics.work(experiment, max(role.operator_flops for role in roles)),
        **_time(experiment, simulation),
        "trace_seconds": round(simulation.trace_seconds, 3),
    }
    return _record(
        experiment,
        suite,
        wall_s,
        outcome=simulation.outcome,
        reason=simulation.reason,
        metrics=found,
        series=_series(experiment, simulation, system),
        flops_formula=counts.flops_formula(experiment.model),
        comm=traffic[0],
        comm_per_layer=per_layer,
        roles=[_role(experiment, role) for role in roles],
        simulated_on=simulation_facts(system, experiment.layout.kernels),
        interval=simulation.time.interval if simulation.time is not None else None,
    )


def failed_record(experiment: Experiment, reason: str, *, suite: str, wall_s: float) -> ExperimentRecord:
    """Return the record of an experiment whose step could not be traced; it contains only the reason."""
    return _record(
        experiment, suite, wall_s, outcome="error", reason=reason, metrics={}, series=StepSeries(), roles=[]
    )


def simulation_facts(system: System, kernels: OperatorSet) -> SimulatedOn:
    """Return the properties of `system` that determine a simulation, and a hash of its numbers and of the calibration
    of `kernels`."""
    from repro.simulate.time.calibration import CalibrationPoint, calibration_point_of, uncertain_numbers

    point = calibration_point_of(kernels, system)
    run: object = point
    if isinstance(point, CalibrationPoint):
        run = (
            *(point.rate, point.products, point.passes, point.attention, point.attention_start),
            point.experiment(models.load_model(point.model)).key,
            systems.load_system_file(point.system),
        )
    numbers = SIMULATOR_REVISION, system, run, {one: one.around for one in uncertain_numbers(system, point)}
    return SimulatedOn(
        system=system.name,
        memory_bytes=system.device.memory_bytes.value,
        context_bytes=system.context(),
        devices_per_node=system.devices_per_node.value,
        links=sorted(system.links),
        numbers=hashlib.sha256(repr(numbers).encode()).hexdigest()[:16],
    )


def _record(experiment: Experiment, suite: str, wall_s: float, **found: Any) -> ExperimentRecord:
    return ExperimentRecord(
        suite=suite,
        name=experiment.name,
        key=experiment.key,
        conditions=experiment.as_dict(),
        evidence=SIMULATED,
        wall_s=round(wall_s, 3),
        **found,
    )


def _held(role: RoleResult) -> Held:
    memory = role.memory
    peak = {"total": memory.peak_bytes, **memory.by_category}
    return Held(memory.states, peak, memory.most, memory.init_peak_bytes)


def _time(experiment: Experiment, simulation: Simulation) -> Metrics:
    prediction = simulation.time
    if prediction is None:
        return {}
    speed = metrics.speed(experiment, prediction.step_s)
    return {**speed, **metrics.parts(prediction.as_dict(), prediction.kernels.others)}


def _series(experiment: Experiment, simulation: Simulation, system: System) -> StepSeries:
    from repro.simulate.memory.live_bytes import live_bytes_over_step
    from repro.simulate.time.device import DeviceCost

    prediction, fullest = simulation.time, simulation.roles.index(simulation.fullest)
    traced, live = simulation.traces[fullest], simulation.fullest.memory.live
    if prediction is None:  # The system lacks rates, so the bytes that an operator moves stand for its time.
        return StepSeries(
            memory=live_bytes_over_step(traced, live, lambda operator: operator.read + operator.written)
        )
    cost = DeviceCost(system, experiment.layout.precision, prediction.kernels, experiment.layout.world)
    slowest = prediction.slowest
    return StepSeries(
        memory=live_bytes_over_step(traced, live, cost.seconds),
        seconds={"busy": dict(slowest.busy), "exposed": dict(slowest.exposed)},
    )


def _role(experiment: Experiment, role: RoleResult) -> SimulatedRole:
    memory, usage, failure = role.memory, _held(role), None
    if (error := role.replay.out_of_memory) is not None:
        sizes = {"allocated_bytes": error.allocated, "reserved_bytes": error.reserved}
        failure = SimulatedFailure(phase=role.replay.phase, **sizes)
    return SimulatedRole(
        name=role.role.name,
        stage=role.role.stage,
        ranks=_ranks(experiment, role),
        parameters=role.parameters,
        states=dict(usage.states),
        peak=dict(usage.peak),
        most=dict(usage.most),
        peak_phase=memory.phase,
        peak_line=memory.line,
        peak_operator=memory.operator,
        reserved_bytes=None if failure else role.replay.peak_reserved,
        failure=failure,
        sent_bytes=sum(row.sent_bytes for row in role.traffic),
    )


def _ranks(experiment: Experiment, role: RoleResult) -> int:
    """Return the number of ranks with a pipeline role: those of its stages, in all replicas and on all tp ranks."""
    return role.role.stages * experiment.layout.world // experiment.layout.pp
