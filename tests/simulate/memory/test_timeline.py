"""Tests of the timeline of live bytes: its peak, categories and phases equal those of the trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.config.enums import Category
from repro.results.record_parts import StepSeries
from repro.simulate.memory.live_bytes import (
    TIMELINE_POINTS,
    TIMELINE_RESOLUTION,
    LiveBytes,
    live_bytes_over_step,
)
from repro.simulate.record import simulated_record
from repro.simulate.step import Simulation, simulate
from repro.simulate.trace.events import Alloc, Event, Free, PhaseStart

MODEL = Model(name="m", layers=4, hidden=256, heads=4, vocab=512, seq=128)

DGX2 = systems.load_system_file("dgx2")
LAYOUTS = {
    "device": Layout(dp=4, zero=1, precision="fp16", micro_batch=2, recompute=True),
    "host": Layout(tp=2, micro_batch=16, recompute=True, pa=True, pa_cpu=True, precision="fp16"),
}


def simulated(layout: Layout, **options: bool) -> tuple[Simulation, StepSeries]:
    """Return a simulated step and the time series of its record."""
    experiment = Experiment(name="e", model=MODEL, layout=layout, system="dgx2")
    found = simulate(experiment, DGX2, **options)
    return found, simulated_record(experiment, found, DGX2, suite="s", wall_s=0.0).series


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_timeline_peak_and_states_equal_those_of_the_step(layout: Layout) -> None:
    """Host memory is a separate row, which does not count in the peak."""
    found, series = simulated(layout, time=True)
    memory, role = series.memory, found.roles[0].memory
    rows = {name: row if len(row) > 1 else row * TIMELINE_POINTS for name, row in memory["bytes"].items()}
    assert {len(row) for row in rows.values()} == {TIMELINE_POINTS}
    assert (Category.HOST in rows) == layout.pa_cpu
    rows.pop(Category.HOST, None)
    tolerance = len(rows) * memory["unit"]
    peak = max(map(sum, zip(*rows.values(), strict=True))) * memory["unit"]
    assert abs(peak - role.peak_bytes) <= tolerance
    for category, size in role.states.items():
        assert abs(rows[category][-1] * memory["unit"] - size) <= memory["unit"]
    assert [name for _, name, _ in memory["phases"]][:2] == ["forward", "backward"]
    assert memory["unit"] <= role.peak_bytes / TIMELINE_RESOLUTION


def test_a_timeline_without_step_time_uses_moved_bytes() -> None:
    found, series = simulated(Layout(dp=2, pp=2, micro_batch=1, global_batch=8))
    assert set(series.as_dict()) == {"memory"}
    traced = found.traces[found.roles.index(found.fullest)]
    live = found.fullest.memory.live
    expected = live_bytes_over_step(traced, live, lambda operator: operator.read + operator.written)
    assert series.memory == expected
    starts = [start for start, _, _ in series.memory["phases"]]
    assert starts == sorted(set(starts))


def test_each_point_is_the_maximum_of_device_bytes() -> None:
    """All events are in one point: 30 bytes on the device, then 20 bytes and 1000 bytes on the host."""
    step: list[Event] = [
        PhaseStart("forward", 0),
        Alloc(1, 20, Category.PARAMETERS, "empty", "model.py:1"),
        Alloc(2, 10, Category.ACTIVATIONS, "mm", "model.py:2"),
        Free(2),
        Alloc(3, 1000, Category.HOST, "empty", "offload.py:3"),
    ]
    traced = SimpleNamespace(events=step, step_start=0, step_stop=len(step))
    found = live_bytes_over_step(traced, LiveBytes(step), lambda operator: 1.0)
    assert found["unit"] == 1
    assert {key: row[0] for key, row in found["bytes"].items()} == {"parameters": 20, "activations": 10}
