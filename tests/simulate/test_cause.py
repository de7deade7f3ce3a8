"""Why a step does not fit: by fragmentation only where all that is ever live would."""

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
def roomy() -> Simulation:
    return simulate(EXPERIMENT, systems.load_system_file("dgx2"))


def under(found: Simulation, limit: int) -> Simulation:
    """The same step on devices whose allocator may have `limit` bytes."""
    roles = [
        replace(role, replay=replay(trace.events, limit))
        for role, trace in zip(found.roles, found.traces, strict=True)
    ]
    return replace(found, limit_bytes=limit, roles=roles)


def test_what_is_live_later_is_the_cause_where_it_is_too_much(roomy: Simulation) -> None:
    live = {role.role.name: role.memory.peak_bytes for role in roomy.roles}
    found = under(roomy, live["first"] - 1_500_000)
    first, last = found.roles
    for role in found.roles:
        assert role.replay.out_of_memory is not None
        assert role.replay.out_of_memory.by_fragmentation, "the request that fails would find room"
    assert not first.by_fragmentation, "but what is live in the backward pass would not"
    assert last.by_fragmentation
    assert found.fullest is first, "which no other allocator would help"
    assert found.required_bytes == live["first"]
    record = simulated_record(EXPERIMENT, found, systems.load_system_file("dgx2"), suite="s", wall_s=0.0)
    assert record.outcome == "oom"
    assert "first stage, init: out of memory by the live tensors: " in record.reason
    assert record.reason.endswith(f"; the peak of live bytes is {live['first']}, in the phase backward")


def test_fragmentation_is_the_cause_where_everything_live_would_fit(roomy: Simulation) -> None:
    found = under(roomy, max(role.memory.peak_bytes for role in roomy.roles) + 1_000_000)
    assert found.fullest.by_fragmentation
    assert found.limit_bytes is not None
    assert found.required_bytes > found.limit_bytes, "the segment that the device cannot give"
    assert "out of memory by fragmentation: " in found.reason
    assert "peak of live bytes" not in found.reason


def test_what_fits_has_no_cause(roomy: Simulation) -> None:
    found = under(roomy, max(role.replay.peak_reserved for role in roomy.roles))
    assert (found.outcome, found.reason) == ("ok", "")
    assert found.required_bytes == found.limit_bytes
    assert not any(role.by_fragmentation for role in found.roles)
