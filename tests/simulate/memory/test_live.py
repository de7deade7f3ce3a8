"""Tests of live bytes by category, of their timeline over a step, and of the memory of the initialisation."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from repro.config import Experiment, Layout, Model, systems
from repro.config.enums import ACCOUNTED, Category
from repro.parallel import mesh as meshes
from repro.parallel.zero.flat_parameters import INITIALISED_ELEMENTS, InitialValues, Sharding, Tag
from repro.parallel.zero.partition import default_units
from repro.parallel.zero.stages import ShardedModule
from repro.results.record_parts import StepSeries
from repro.simulate.memory.allocator import replay
from repro.simulate.memory.live_bytes import (
    TIMELINE_POINTS,
    TIMELINE_RESOLUTION,
    LiveBytes,
    live_bytes_over_step,
    measure_live_bytes,
)
from repro.simulate.memory.pools import round_up
from repro.simulate.record import simulated_record
from repro.simulate.step import Simulation, simulate
from repro.simulate.trace.events import Alloc, Event, Free, Mark, Operator, PhaseStart
from repro.simulate.trace.recorder import TraceRecorder

EVENTS: list[Event] = [
    PhaseStart("init", -1),
    Alloc(1, 100, Category.OTHER, "empty", "model.py:1"),
    Mark(1, Category.PARAMETERS),
    PhaseStart("forward", 0),
    Alloc(2, 1000, Category.HOST, "empty", "offload.py:2"),
    Alloc(3, 30, Category.ACTIVATIONS, "mm", "model.py:3"),
    Operator("aten.mm", 1, 1, 1, (), 4),
    PhaseStart("backward", 0),
    Alloc(4, 20, Category.OTHER, "mul", "model.py:4"),
    Mark(4, Category.GRADIENTS),
    Free(3),
    Free(2),
    PhaseStart("optimizer", -1),
    Alloc(5, 30, Category.OTHER, "add", "adamw.py:5"),
    Free(5),
]


def test_the_peak_is_the_first_maximum_of_live_bytes() -> None:
    found = measure_live_bytes(EVENTS)
    assert (found.peak_bytes, found.init_peak_bytes, found.host_bytes) == (150, 100, 1000)
    assert (found.phase, found.line, found.operator) == ("backward", "model.py:4", "mul")
    at_peak = {"parameters": 100, "host": 1000, "activations": 30, "other": 20}
    assert +Counter(found.by_category) == at_peak
    assert found.states == {"parameters": 100, "gradients": 20, "optimizer": 0}
    assert (found.states_bytes, found.most[Category.GRADIENTS]) == (120, 20)
    empty = measure_live_bytes([])
    assert (empty.peak_bytes, empty.init_peak_bytes, empty.states_bytes, empty.host_bytes) == (0, 0, 0, 0)


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Draw allocations, releases and changes of category in any order."""
    events: list[Event] = []
    live: list[int] = []
    for number in range(draw(st.integers(0, 30))):
        kind = draw(st.sampled_from(["alloc", "alloc", "free", "mark", "phase", "operator"]))
        category = draw(st.sampled_from([Category.HOST, Category.ACTIVATIONS, Category.GRADIENTS]))
        if kind == "alloc":
            size = draw(st.integers(0, 3))
            events.append(Alloc(number, size, category, f"operator {number}", f"line {number}"))
            live.append(number)
        elif kind == "free" and live:
            events.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
        elif kind == "mark" and live:
            events.append(Mark(draw(st.sampled_from(live)), category))
        elif kind == "phase":
            events.append(PhaseStart(f"phase {number}", 0))
        else:
            events.append(Operator("aten.mm", 1, 1, 1, (), 4))
    return events


@given(traces())
def test_the_peak_equals_the_maximum_over_all_allocations(events: list[Event]) -> None:
    live, phase, peak = dict[int, tuple[Category, int]](), "", 0
    expected: tuple[object, ...] = (dict.fromkeys(ACCOUNTED, 0), "", "", "")
    for event in events:
        if isinstance(event, PhaseStart):
            phase = event.name
        elif isinstance(event, Free):
            live.pop(event.id)
        elif isinstance(event, Mark):
            live[event.id] = event.category, live[event.id][1]
        elif isinstance(event, Alloc):
            live[event.id] = event.category, event.bytes
            now = {key: sum(size for category, size in live.values() if category == key) for key in ACCOUNTED}
            total = sum(now.values()) - now[Category.HOST]
            if event.category != Category.HOST and total > peak:
                peak, expected = total, (now, phase, event.line, event.operator)
    found = measure_live_bytes(events)
    assert found.peak_bytes == peak
    assert (found.by_category, found.phase, found.line, found.operator) == expected


def test_page_locked_memory_is_rounded_and_retained() -> None:
    """An allocation of 5 bytes takes 8. A freed block serves only later allocations of its size."""

    def host(id: int, size: int) -> Alloc:
        return Alloc(id, size, Category.HOST, "", "")

    device = Alloc(9, 1000, Category.ACTIVATIONS, "", "")
    found = measure_live_bytes(
        [host(1, 5), device, host(2, 8), Free(1), host(3, 7), host(4, 4), Free(9), host(5, 1)]
    )
    assert found.host_bytes == 8 + 7 + 4 + 1
    assert found.host_reserved_bytes == 8 + 8 + 4 + 1


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


META = torch.device("meta")
WIDTH = 3200
"""Width of a layer whose parameters fill 20.5 MB in 16 bits, fewer than one temporary of 64-bit indices."""


def without_temporaries(index: int, start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, device=META)


def with_temporaries(index: int, start: int, stop: int) -> Tensor:
    """Return values after two temporaries of 64-bit integers, as the initialisation of a GPT on a device does."""
    indices = torch.empty(stop - start, dtype=torch.int64, device=META)
    words = indices.clone()
    return (words >> 40).float()


def reserved_bytes(layers: int, stage: int, values: InitialValues) -> int:
    """Return the reserved bytes after the initialisation of `layers` layers in 16 bits."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=META) for _ in range(layers)))
    sharding = Sharding.from_layout(Layout(zero=stage), meshes.single_rank_mesh().dp, META, torch.bfloat16)
    with TraceRecorder() as recorder:
        sharded = ShardedModule(module, default_units(module), sharding, lambda p: Tag(0), lambda _: values)
    assert len(sharded.buckets) == layers
    return replay(recorder.finish()).peak_reserved


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buckets_do_not_reuse_blocks_of_temporaries(stage: int) -> None:
    """The temporaries add their bytes once, for any number of buckets."""
    temporary_bytes = INITIALISED_ELEMENTS * (8 + 8 + 8 + 4)
    for layers in (4, 16):
        values = (with_temporaries, without_temporaries)
        more, fewer = (reserved_bytes(layers, stage, each) for each in values)
        assert fewer <= more <= fewer + round_up(temporary_bytes, 2 << 20)
