"""What is live over a step, in a few numbers: its peak, its categories and its phases are the trace's own."""

from __future__ import annotations

from repro import systems
from repro.config import Experiment, Layout, Model
from repro.simulate.memory.timeline import POINTS, STEPS, over_step
from repro.simulate.record import simulated_record
from repro.simulate.step import simulate

MODEL = Model(name="m", layers=4, hidden=256, heads=4, vocab=512, seq=128)


def test_the_peak_and_the_states_are_those_of_the_step() -> None:
    e = Experiment(
        name="e",
        model=MODEL,
        layout=Layout(dp=4, zero=1, precision="fp16", micro_batch=2, recompute=True),
        system="dgx2",
    )
    found = simulate(e, systems.load("dgx2"), time=True)
    memory = simulated_record(e, found, systems.load("dgx2"), suite="s", wall_s=0.0).series.memory
    rows = {name: row if len(row) > 1 else row * POINTS for name, row in memory["bytes"].items()}
    assert {len(row) for row in rows.values()} == {POINTS}
    room = len(rows) * memory["unit"]
    peak = max(map(sum, zip(*rows.values(), strict=True))) * memory["unit"]
    assert abs(peak - found.roles[0].memory.peak_bytes) <= room
    for category, size in found.roles[0].memory.states.items():
        assert abs(rows[category][-1] * memory["unit"] - size) <= memory["unit"]
    assert [name for _, name, _ in memory["phases"]][:2] == ["forward", "backward"]
    assert memory["unit"] <= found.roles[0].memory.peak_bytes / STEPS


def test_without_time_the_step_is_laid_out_by_the_bytes_that_it_moves() -> None:
    e = Experiment(
        name="e", model=MODEL, layout=Layout(dp=2, pp=2, micro_batch=1, global_batch=8), system="dgx2"
    )
    found = simulate(e, systems.load("dgx2"))
    series = simulated_record(e, found, systems.load("dgx2"), suite="s", wall_s=0.0).series
    assert set(series.as_dict()) == {"memory"}
    traced = found.traces[found.roles.index(found.fullest)]
    assert series.memory == over_step(traced, lambda operator: operator.read + operator.written)
    starts = [part for part, _, _ in series.memory["phases"]]
    assert starts == sorted(set(starts))
