"""Simulation of one step of an experiment on a system: memory, out-of-memory cause, communication and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from repro.config import Experiment
from repro.config.errors import ConfigError
from repro.config.system import System
from repro.measure.memory import AllocationHistory, write_memory_snapshot
from repro.model import counts
from repro.results.record_parts import TrafficRow
from repro.simulate.memory.allocator import Replay, replay
from repro.simulate.memory.live_bytes import RoleMemory, measure_live_bytes
from repro.simulate.memory.pools import segment_size
from repro.simulate.placement import Placement
from repro.simulate.time.predict import Prediction, predict
from repro.simulate.trace.roles import PipelineRole, Trace, roles, trace
from repro.util.processes import pause_garbage_collection

NO_STEP_TIME = "the step does not fit the device's memory"
"""Printed reason why a step that exceeds the device's memory has no predicted time."""


@dataclass
class RoleResult:
    """Simulation result of one pipeline role (pipeline stages with equal layers)."""

    role: PipelineRole
    memory: RoleMemory
    replay: Replay
    traffic: list[TrafficRow]
    operator_flops: int
    """FLOP of all operators of one rank with this role in a step."""
    parameters: int

    @property
    def by_fragmentation(self) -> bool:
        """Whether the step fails by fragmentation: a request fails, but the peak of live bytes is within the limit."""
        error = self.replay.out_of_memory
        return error is not None and error.by_fragmentation and self.memory.peak_bytes <= error.limit


@dataclass
class Simulation:
    """Result of the simulation of one step, in bytes, FLOP and seconds."""

    experiment: Experiment
    system: str
    limit_bytes: int | None
    """Bytes that the allocator can reserve: the device's memory less the CUDA context; None if unknown."""
    context_bytes: int
    roles: list[RoleResult]
    trace_seconds: float
    traces: list[Trace] = field(default_factory=list, repr=False)
    time: Prediction | None = None
    """Prediction of the step time; None unless it was requested and the system has the required numbers."""
    no_time: str = ""
    """Reason why the step has no predicted time; empty if it has one."""

    @property
    def fullest(self) -> RoleResult:
        """Pipeline role with the highest memory use.

        A role whose live bytes exceed the memory comes first, then a role that is out of memory by fragmentation. If
        all roles fit, the role with the most reserved bytes is chosen.
        """
        return max(
            self.roles,
            key=lambda r: (
                r.replay.out_of_memory is not None,
                not r.by_fragmentation,
                r.replay.peak_reserved,
            ),
        )

    @property
    def busiest(self) -> RoleResult:
        """Pipeline role whose ranks send the most bytes in a step."""
        return max(self.roles, key=lambda r: sum(t.sent_bytes for t in r.traffic))

    @property
    def outcome(self) -> str:
        """Outcome of the simulated step: `ok`, or `oom` if a pipeline role exceeds its device's memory."""
        return "oom" if self.fullest.replay.out_of_memory else "ok"

    @property
    def fits(self) -> bool:
        """Whether the memory of all pipeline roles fits the device's memory."""
        return self.outcome == "ok"

    @property
    def required_bytes(self) -> int:
        """Bytes that the allocator of the role with the most memory needs; a lower bound if the step does not fit."""
        role = self.fullest
        error = role.replay.out_of_memory
        if error is None:
            return role.replay.peak_reserved
        by_fragmentation = error.reserved + segment_size(error.requested)
        return by_fragmentation if role.by_fragmentation else role.memory.peak_bytes

    @property
    def reason(self) -> str:
        """Reason why the step does not fit the device's memory; empty if it fits."""
        error = self.fullest.replay.out_of_memory
        if error is None:
            return ""
        role = self.fullest
        where = "" if role.role.name == "all" else f"{role.role.name} stage, "
        text = f"{where}{role.replay.phase}: {error.because_of(role.by_fragmentation)}"
        if error.by_fragmentation and not role.by_fragmentation:
            text += f"; the peak of live bytes is {role.memory.peak_bytes}, in the phase {role.memory.phase}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `repro simulate --json`, as dictionaries, lists, texts and numbers."""
        e, fullest, busiest = self.experiment, self.fullest, self.busiest
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "model": e.model.name,
            "system": self.system,
            "gpus": e.layout.world,
            "layout": e.as_dict()["layout"],
            "params": counts.total_parameters(e.model),
            "memory": {
                "peak_bytes": fullest.memory.peak_bytes,
                "reserved_bytes": fullest.replay.peak_reserved,
                "context_bytes": self.context_bytes,
                "limit_bytes": self.limit_bytes,
                "states_bytes": fullest.memory.states_bytes,
                "host_bytes": fullest.memory.host_bytes,
                "host_reserved_bytes": fullest.memory.host_reserved_bytes,
                "init_peak_bytes": fullest.memory.init_peak_bytes,
                "by_category": fullest.memory.by_category,
                "most_by_category": fullest.memory.most,
                "states": fullest.memory.states,
                "peak_phase": fullest.memory.phase,
                "peak_line": fullest.memory.line,
                "peak_operator": fullest.memory.operator,
                "fragmentation": fullest.replay.fragmentation,
                "by_role": {role.role.name: _role_document(role) for role in self.roles},
            },
            "comm": {
                "role": busiest.role.name,
                "sent_bytes": sum(t.sent_bytes for t in busiest.traffic),
                "bytes_by_group": sent_bytes_by(busiest.traffic, "group"),
                "bytes_by_link": sent_bytes_by(busiest.traffic, "link"),
                "rows": [t.as_dict() for t in busiest.traffic],
            },
            "flops": {
                "model": counts.model_flops(e.model, e.seq, e.layout.global_batch),
                "model_causal": counts.causal_flops(e.model, e.seq, e.layout.global_batch),
                "hardware": counts.hardware_flops(e.model, e.seq, e.layout.global_batch, e.layout.recompute),
                "operators_of_busiest_rank": max(role.operator_flops for role in self.roles),
                "formula": counts.flops_formula(e.model),
            },
            "time": None if self.time is None or not self.fits else self.time.as_dict(),
            "no_time": self.no_time if self.fits else NO_STEP_TIME,
            "trace_seconds": round(self.trace_seconds, 3),
        }


def _role_document(role: RoleResult) -> dict[str, Any]:
    return {
        "stage": role.role.stage,
        "stages": role.role.stages,
        "parameters": role.parameters,
        "peak_bytes": role.memory.peak_bytes,
        "reserved_bytes": role.replay.peak_reserved,
        "states_bytes": role.memory.states_bytes,
        "by_category": role.memory.by_category,
        "sent_bytes": sum(t.sent_bytes for t in role.traffic),
    }


def sent_bytes_by(rows: list[TrafficRow], key: str) -> dict[str, int]:
    """Return the sent bytes of the traffic table `rows`, summed for each value of `key`, which is `group` or `link`."""
    found: Counter[str] = Counter()
    for row in rows:
        found[getattr(row, key)] += row.sent_bytes
    return dict(found)


def write_snapshot(path: Path, found: Simulation, *, expandable: bool) -> None:
    """Write a snapshot of a simulated step for PyTorch's memory viewer, in which each pipeline role is a device."""
    devices = []
    for traced in found.traces:
        devices.append(AllocationHistory())
        replay(traced.events, found.limit_bytes, expandable=expandable, history=devices[-1])
    write_memory_snapshot(path, devices)


@pause_garbage_collection()
def simulate(
    experiment: Experiment,
    system: System,
    *,
    memory_limit: int | None = None,
    expandable: bool = False,
    gloo: bool = False,
    time: bool = False,
    record: bool = False,
    interval: bool = False,
) -> Simulation:
    """Trace every pipeline role of `experiment`, and simulate its memory and communication on `system`.

    `memory_limit`: bytes of a device's memory; None selects those of the system. `expandable`: use expandable segments.
    `gloo`: include buffers of gloo's transport. `time`: also predict the step time. `record`: also store each busy
    interval of each stream. `interval`: also predict the uncertainty interval of the step time.
    """
    began = perf_counter()
    context = system.context()
    size = memory_limit if memory_limit is not None else system.device.memory_bytes.value
    limit = None if size is None else max(0, int(size) - context)
    placement = Placement(experiment.layout, system)
    results, traces = [], []
    for role in roles(experiment):
        traced = trace(experiment, role, gloo=gloo)
        traces.append(traced)
        results.append(
            RoleResult(
                role,
                measure_live_bytes(traced.events),
                replay(traced.events, limit, expandable=expandable),
                _traffic(traced, placement),
                sum(n * event.flops for n, event in traced.operators()),
                traced.parameters,
            )
        )
    prediction, no_time = None, ""
    if time:
        try:
            prediction = predict(experiment, system, traces, record=record, interval=interval)
        except ConfigError as error:  # A missing hardware rate prevents the prediction of time only.
            no_time = str(error)
    seconds = perf_counter() - began
    return Simulation(experiment, system.name, limit, context, results, seconds, traces, prediction, no_time)


def _traffic(traced: Trace, placement: Placement) -> list[TrafficRow]:
    links = placement.links(traced.layout.group_of("pp", 0)[traced.role.stage])
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for times, message in traced.messages():
        sums = {"calls": times, "payload_bytes": times * message.payload, "sent_bytes": times * message.sent}
        key = message.op, message.group, message.purpose
        row = found.setdefault(key, {"size": message.size, **dict.fromkeys(sums, 0)})
        row |= {name: row[name] + more for name, more in sums.items()}
    return [
        TrafficRow(op=op, group=group, purpose=purpose, link=links[group], **row)
        for (op, group, purpose), row in sorted(found.items())
    ]
