"""Tests of the document, the record and the out-of-memory cause of a simulated step, and of the document of a fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.results.record_parts import TrafficRow
from repro.simulate import step
from repro.simulate.memory.allocator import replay
from repro.simulate.plan import fit
from repro.simulate.plan.fit import FitAnswer, FitTrial
from repro.simulate.record import simulated_record
from repro.simulate.step import NO_STEP_TIME, Simulation, simulate

EXPERIMENT = Experiment(
    name="two-stages",
    model=Model(name="m", layers=4, hidden=256, heads=4, vocab=512, seq=128),
    layout=Layout(dp=3, tp=2, pp=2, precision="fp16", micro_batch=2, global_batch=24),
    system="dgx2",
)
DGX2 = systems.load_system_file("dgx2")


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return replace(simulate(EXPERIMENT, DGX2), trace_seconds=1.23456)


def traffic_row(group: str, link: str, sent_bytes: int) -> TrafficRow:
    common = {"op": "all_reduce", "purpose": "x", "size": 2, "calls": 1, "payload_bytes": 7}
    return TrafficRow(**common, group=group, link=link, sent_bytes=sent_bytes)


def test_a_document_describes_the_fullest_and_the_busiest_role(simulation: Simulation) -> None:
    first, last = simulation.roles
    rows = [traffic_row("dp", "far", 10), traffic_row("tp", "near", 30), traffic_row("dp", "near", 2)]
    first, last = replace(first, traffic=[traffic_row("dp", "far", 41)]), replace(last, traffic=rows)
    fullest = max((first, last), key=lambda role: role.replay.peak_reserved)
    described = replace(simulation, roles=[first, last]).as_dict()
    assert (described["gpus"], described["outcome"], described["reason"]) == (12, "ok", "")
    assert described["trace_seconds"] == 1.235
    assert described["comm"] == {
        "role": "last",
        "sent_bytes": 42,
        "bytes_by_group": {"dp": 12, "tp": 30},
        "bytes_by_link": {"far": 10, "near": 32},
        "rows": [row.as_dict() for row in rows],
    }
    memory = described["memory"]
    assert memory["peak_bytes"] == fullest.memory.peak_bytes
    assert memory["reserved_bytes"] == fullest.replay.peak_reserved
    assert memory["limit_bytes"] + memory["context_bytes"] == DGX2.device.memory_bytes.value
    keys, by_role = ("stage", "stages", "sent_bytes"), memory["by_role"]
    found = {name: [role[key] for key in keys] for name, role in by_role.items()}
    assert found == {"first": [0, 1, 41], "last": [1, 1, 42]}
    assert described["flops"]["operators_of_busiest_rank"] == max(first.operator_flops, last.operator_flops)
    assert (described["time"], described["no_time"]) == (None, ""), "the step time was not requested"


def test_the_memory_limit_excludes_the_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((5.0, 7.5))
    monkeypatch.setattr(step, "perf_counter", lambda: next(times))
    limited = simulate(EXPERIMENT, DGX2, time=True, memory_limit=DGX2.context() + 1_000_000)
    described = limited.as_dict()
    assert (limited.limit_bytes, limited.trace_seconds) == (1_000_000, 2.5)
    assert (described["outcome"], described["time"], described["no_time"]) == ("oom", None, NO_STEP_TIME)
    monkeypatch.undo()
    assert simulate(EXPERIMENT, DGX2, memory_limit=1).limit_bytes == 0, "the CUDA context exceeds the limit"


def test_a_record_contains_the_rank_count_of_each_role(simulation: Simulation) -> None:
    first, last = simulation.roles
    roles = [replace(role, replay=replace(role.replay, retries=n)) for role, n in ((first, 3), (last, 1))]
    record = simulated_record(EXPERIMENT, replace(simulation, roles=roles), DGX2, suite="s", wall_s=9.87654)
    metrics = record.metrics
    assert (record.wall_s, metrics["trace_seconds"]) == (9.877, 1.235)
    assert [(role.name, role.ranks) for role in record.roles] == [("first", 6), ("last", 6)]
    assert metrics["parameters"] == first.parameters
    assert metrics["memory.retries"] == 3
    assert record.comm == first.traffic


def test_a_fit_document_sums_the_traces_of_all_trials() -> None:
    """A trial without a trace adds neither a trace nor seconds."""
    model = Model(name="m", layers=1, hidden=64, heads=4, vocab=512, seq=32)
    question = fit.FitQuestion(
        model, Layout(), DGX2, 10**10, fit.LAYERS, 0, free_batch=True, expandable=False
    )
    traced = {"traces": 2, "trace_seconds": 0.50049, "reserved_bytes": 70, "largest_term": "activations"}
    fits = FitTrial(3, "ok", 90, detail=traced)
    fails = FitTrial(
        4, "oom", 110, "activations", "too much", {"traces": 1, "trace_seconds": 1.0, "largest_term": "x"}
    )
    described = fit.fit_document(question, FitAnswer(fits, fails, [fits, fails, FitTrial(9, "hang", None)]))
    assert (described["traces"], described["trace_seconds"]) == (3, 1.5)
    assert described["trials"] == [
        {"value": 3, "outcome": "ok", "needed_bytes": 90},
        {"value": 4, "outcome": "oom", "needed_bytes": 110},
        {"value": 9, "outcome": "hang", "needed_bytes": None},
    ]
    assert (described["binding"], described["limit_bytes"]) == ("activations", 10**10 - DGX2.context())
    assert described["largest"]["needed_bytes"] == 70, "reserved bytes"
    assert described["first_failing"]["needed_bytes"] == 110
    assert (described["largest"]["layers"], described["first_failing"]["largest_term"]) == (3, "x")


def with_limit(simulation: Simulation, limit: int) -> Simulation:
    """Return the step on devices whose allocator has a limit of `limit` bytes."""
    roles = [
        replace(role, replay=replay(trace.events, limit))
        for role, trace in zip(simulation.roles, simulation.traces, strict=True)
    ]
    return replace(simulation, limit_bytes=limit, roles=roles)


def test_cause_is_live_tensors_if_later_peak_exceeds_limit(simulation: Simulation) -> None:
    live = {role.role.name: role.memory.peak_bytes for role in simulation.roles}
    found = with_limit(simulation, live["first"] - 1_500_000)
    first, last = found.roles
    for role in found.roles:
        assert role.replay.out_of_memory.by_fragmentation, "live bytes and request fit the limit"
    assert not first.by_fragmentation, "the live bytes of the backward pass exceed the limit"
    assert last.by_fragmentation
    assert found.fullest is first, "the first stage exceeds the limit with any allocator"
    assert found.required_bytes == live["first"]
    record = simulated_record(EXPERIMENT, found, DGX2, suite="s", wall_s=0.0)
    assert record.outcome == "oom"
    assert "first stage, init: out of memory by the live tensors: " in record.reason
    assert record.reason.endswith(f"; the peak of live bytes is {live['first']}, in the phase backward")


def test_cause_is_fragmentation_if_peak_live_bytes_fit(simulation: Simulation) -> None:
    found = with_limit(simulation, max(role.memory.peak_bytes for role in simulation.roles) + 1_000_000)
    assert found.fullest.by_fragmentation
    assert found.required_bytes > found.limit_bytes, "the failing segment is included"
    assert "out of memory by fragmentation: " in found.reason
    assert "peak of live bytes" not in found.reason
    fits = with_limit(simulation, max(role.replay.peak_reserved for role in simulation.roles))
    assert (fits.outcome, fits.reason) == ("ok", "")
    assert fits.required_bytes == fits.limit_bytes
    assert not any(role.by_fragmentation for role in fits.roles)
