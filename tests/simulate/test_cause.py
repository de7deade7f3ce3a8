"""Tests of the out-of-memory cause of a step: fragmentation only if the peak of live bytes is below the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.simulate.memory.allocator import replay
from repro.simulate.record import simulated_record
from repro.simulate.step import Simulation, simulate

EXPERIMENT = Experiment(
    name="two-stages",
    model=Model(name="m", layers=4, hidden=256, heads=4, vocab=512, seq=128),
    layout=Layout(dp=2, pp=2, precision="fp16", micro_batch=2, global_batch=8),
    system="dgx2",
)


@pytest.fixture(scope="module")
def step() -> Simulation:
    return simulate(EXPERIMENT, systems.load_system_file("dgx2"))


def with_limit(step: Simulation, limit: int) -> Simulation:
    """Return the step on devices whose allocator has a limit of `limit` bytes."""
    roles = [
        replace(role, replay=replay(trace.events, limit))
        for role, trace in zip(step.roles, step.traces, strict=True)
    ]
    return replace(step, limit_bytes=limit, roles=roles)


def test_cause_is_live_tensors_if_later_peak_exceeds_limit(step: Simulation) -> None:
    live = {role.role.name: role.memory.peak_bytes for role in step.roles}
    found = with_limit(step, live["first"] - 1_500_000)
    first, last = found.roles
    for role in found.roles:
        assert role.replay.out_of_memory is not None
        assert role.replay.out_of_memory.by_fragmentation, "live bytes and request fit the limit"
    assert not first.by_fragmentation, "the live bytes of the backward pass exceed the limit"
    assert last.by_fragmentation
    assert found.fullest is first, "the first stage exceeds the limit with any allocator"
    assert found.required_bytes == live["first"]
    record = simulated_record(EXPERIMENT, found, systems.load_system_file("dgx2"), suite="s", wall_s=0.0)
    assert record.outcome == "oom"
    assert "first stage, init: out of memory by the live tensors: " in record.reason
    assert record.reason.endswith(f"; the peak of live bytes is {live['first']}, in the phase backward")


def test_cause_is_fragmentation_if_peak_live_bytes_fit(step: Simulation) -> None:
    found = with_limit(step, max(role.memory.peak_bytes for role in step.roles) + 1_000_000)
    assert found.fullest.by_fragmentation
    assert found.limit_bytes is not None
    assert found.required_bytes > found.limit_bytes, "the failing segment is included"
    assert "out of memory by fragmentation: " in found.reason
    assert "peak of live bytes" not in found.reason


def test_a_step_that_fits_has_no_failure_cause(step: Simulation) -> None:
    found = with_limit(step, max(role.replay.peak_reserved for role in step.roles))
    assert (found.outcome, found.reason) == ("ok", "")
    assert found.required_bytes == found.limit_bytes
    assert not any(role.by_fragmentation for role in found.roles)
