"""Records made of what a simulated step says, under the names of the measured ones where they mean the same.

Memory is the largest of any role, communication that of the role which holds rank 0 (the first stage), and
`comm.purpose.*` are summed over all ranks, as in `repro.results.record`.  A simulation knows more:
`memory.reserved_bytes` is what the caching allocator would reserve on the fullest device,
`memory.used_bytes` that and the context beside it, `memory.communication_bytes` the most that buffers of
messages take, `comm.link.CLASS.sent_bytes` what goes over a class of links, `time.*` where the slowest
stage's seconds go.  Times are there where the system says enough; `trace_seconds` is what the simulation
itself took.  `series.memory` is what is live on the fullest role over the step
(`repro.simulate.memory.timeline`), `series.seconds` the slowest stage's seconds by kind of operator and of
exposed communication.

A step that does not fit has needs all the same: a record with the outcome `oom` says what would be live,
but not what would be reserved.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from repro.config import Experiment
from repro.config.system import System
from repro.models import flops, parameters
from repro.parallel.pipeline.schedule import build, in_flight
from repro.results.record import head
from repro.results.store import SIMULATED

if TYPE_CHECKING:
    from repro.simulate.step import RoleResult, Simulation


def simulated_record(
    experiment: Experiment, simulation: Simulation, system: System, *, suite: str, wall_s: float
) -> dict[str, Any]:
    """The record of one simulated experiment, `ok` or `oom`; its provenance is still to come."""
    first = simulation.roles[0]
    per_layer = _per_layer(experiment, first)
    return _record(experiment, suite, wall_s) | {
        "outcome": simulation.outcome,
        "reason": simulation.reason,
        "metrics": {
            "parameters": first.parameters,
            "padding": simulation.traces[0].padding,
            **_memory(simulation),
            **_communication(experiment, simulation, per_layer),
            **_work(experiment, simulation),
            **_time(experiment, simulation),
            "trace_seconds": round(simulation.trace_seconds, 3),
        },
        "series": _series(experiment, simulation, system),
        "flops_formula": flops.FORMULA,
        "comm": [row.__dict__ for row in first.traffic],
        "comm_per_layer": per_layer,
        "roles": [_role(experiment, role) for role in simulation.roles],
        "simulated_on": facts(system),
    }


def failed_record(experiment: Experiment, reason: str, *, suite: str, wall_s: float) -> dict[str, Any]:
    """The record of an experiment whose step could not be traced; it says why and nothing else."""
    return _record(experiment, suite, wall_s) | {"outcome": "error", "reason": reason}


def facts(system: System) -> dict[str, Any]:
    """What a simulation takes from a system: with other numbers, an older record is out of date.

    `numbers` stands for all that its time depends on.
    """
    from repro.simulate.time.calibration_points import calibration_points

    return {
        "system": system.name,
        "memory_bytes": system.device.memory_bytes.value,
        "context_bytes": system.context(),
        "devices_per_node": system.devices_per_node.value,
        "links": sorted(system.links),
        "numbers": hashlib.sha256(repr((system, calibration_points())).encode()).hexdigest()[:16],
    }


def _record(experiment: Experiment, suite: str, wall_s: float) -> dict[str, Any]:
    """A record without results, with every part that a measured one has."""
    return {
        **head("experiment", suite, experiment.name),
        "key": experiment.key,
        "experiment": experiment.as_dict(),
        "evidence": SIMULATED,
        "metrics": {},
        "series": {},
        "flops_formula": "",
        "memory_by_rank": [],
        "comm": [],
        "comm_per_layer": [],
        "comm_by_rank": [],
        "roles": [],
        "provenance": {},
        "wall_s": round(wall_s, 3),
    }


def _memory(simulation: Simulation) -> dict[str, float]:
    roles = simulation.roles
    memories = [role.memory for role in roles]
    metrics: dict[str, float] = {
        "memory.states_bytes": max(memory.states_bytes for memory in memories),
        "memory.peak_bytes": max(memory.peak_bytes for memory in memories),
        # Checkpoints are activations that forward keeps.
        "memory.activations_bytes": max(
            memory.by_category["activations"] + memory.by_category["checkpoints"] for memory in memories
        ),
        "memory.checkpoints_bytes": max(memory.most["checkpoints"] for memory in memories),
        "memory.host_bytes": max(memory.host_bytes for memory in memories),
        "memory.init_peak_bytes": max(memory.init_peak_bytes for memory in memories),
        "memory.context_bytes": simulation.context_bytes,
    }
    metrics["memory.communication_bytes"] = max(memory.most["communication"] for memory in memories)
    for category in ("parameters", "gradients", "optimizer"):
        metrics[f"memory.{category}_bytes"] = max(memory.states[category] for memory in memories)
    if simulation.limit_bytes is not None:
        metrics["memory.limit_bytes"] = simulation.limit_bytes
    if simulation.outcome == "ok":
        replay = simulation.fullest.replay
        metrics["memory.reserved_bytes"] = replay.peak_reserved
        metrics["memory.used_bytes"] = replay.peak_reserved + simulation.context_bytes
        metrics["memory.fragmentation"] = round(replay.fragmentation, 6)
        metrics["memory.retries"] = max(role.replay.retries for role in roles)
    return metrics


def _communication(
    experiment: Experiment, simulation: Simulation, per_layer: list[dict[str, Any]]
) -> dict[str, float]:
    rows = simulation.roles[0].traffic
    metrics: dict[str, float] = {"comm.sent_bytes": sum(row.sent_bytes for row in rows)}

    def add(name: str, value: float) -> None:
        metrics[name] = metrics.get(name, 0) + value

    for row in rows:
        for quantity in ("calls", "payload_bytes", "sent_bytes"):
            add(f"comm.{row.group}.{row.op}.{quantity}", getattr(row, quantity))
        if row.link:
            add(f"comm.link.{row.link}.sent_bytes", row.sent_bytes)
    for layer in per_layer:
        for quantity in ("calls", "sent_bytes"):
            add(f"comm.per_layer.{layer['group']}.{layer['op']}.{quantity}", layer[quantity])
    for role in simulation.roles:
        ranks = _ranks(experiment, role)
        for row in role.traffic:
            if row.purpose:
                for quantity in ("calls", "sent_bytes"):
                    name = f"comm.purpose.{row.group}.{row.purpose.replace(' ', '_')}.{quantity}"
                    add(name, ranks * getattr(row, quantity))
    return metrics


def _work(experiment: Experiment, simulation: Simulation) -> dict[str, float]:
    model, layout = experiment.model, experiment.layout
    metrics: dict[str, float] = {
        "model.parameters": parameters.total(model),
        "flops.model": flops.model_flops(model, experiment.seq, layout.global_batch),
        "flops.hardware": flops.hardware_flops(model, experiment.seq, layout.global_batch, layout.recompute),
        "flops.operators": max(role.operator_flops for role in simulation.roles),
    }
    if layout.pp > 1:
        schedule = build(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
        metrics["pipeline.in_flight"] = max(map(in_flight, schedule))
    return metrics


def _time(experiment: Experiment, simulation: Simulation) -> dict[str, float]:
    prediction = simulation.time
    if prediction is None:
        return {}
    found, samples = prediction.as_dict(), prediction.samples_per_s
    per_sample = experiment.layout.global_batch
    hardware = flops.hardware_flops(experiment.model, experiment.seq, per_sample, experiment.layout.recompute)
    parts = ("compute_s", "optimizer_s", "exposed_s", "hidden_s", "bubble_s")
    return {
        "step_seconds.median": prediction.seconds,
        "samples_per_s": samples,
        "tokens_per_s": samples * experiment.seq,
        "model_flops_per_s": flops.model_flops(experiment.model, experiment.seq, per_sample)
        / prediction.seconds,
        "hardware_flops_per_s": hardware / prediction.seconds,
        "hardware_flops_per_s.device": prediction.flops_per_device,
        **{f"time.{part}": found[part] for part in parts},
        "time.factor": prediction.factor,
    }


def _series(experiment: Experiment, simulation: Simulation, system: System) -> dict[str, Any]:
    from repro.simulate.memory.timeline import over_step
    from repro.simulate.time.device import DeviceCost

    prediction, fullest = simulation.time, simulation.roles.index(simulation.fullest)
    traced = simulation.traces[fullest]
    if prediction is None:  # no peak, no bandwidth: operators by the bytes that they move
        return {"memory": over_step(traced, lambda operator: operator.read + operator.written)}
    cost = DeviceCost(system, experiment.layout.precision, prediction.factor)
    found = prediction.as_dict()
    return {
        "memory": over_step(traced, cost.seconds),
        "seconds": {"busy": found["compute_by_kind"], "exposed": found["exposed_by_kind"]},
    }


def _per_layer(experiment: Experiment, role: RoleResult) -> list[dict[str, Any]]:
    """What one block communicates for one micro-batch, on average over the role's blocks."""
    layout = experiment.layout
    parts = layout.parts(experiment.model.layers)[role.role.stage :: layout.pp]
    uses = layout.accumulation * sum(map(len, parts))
    return [
        {"op": row.op, "group": row.group, "calls": row.calls / uses, "sent_bytes": row.sent_bytes / uses}
        for row in role.traffic
        if row.purpose == "block"
    ]


def _role(experiment: Experiment, role: RoleResult) -> dict[str, Any]:
    memory, error = role.memory, role.replay.out_of_memory
    return {
        "name": role.role.name,
        "stage": role.role.stage,
        "ranks": _ranks(experiment, role),
        "parameters": role.parameters,
        "states": memory.states,
        "peak": {"total": memory.peak_bytes, **memory.by_category},
        "most": memory.most,
        "peak_phase": memory.phase,
        "peak_line": memory.line,
        "peak_operator": memory.operator,
        "reserved_bytes": None if error else role.replay.peak_reserved,
        "sent_bytes": sum(row.sent_bytes for row in role.traffic),
    }


def _ranks(experiment: Experiment, role: RoleResult) -> int:
    """Ranks that do the same: the role's stages in every replica, on every tensor-parallel rank."""
    return role.role.stages * experiment.layout.tp * experiment.layout.dp
