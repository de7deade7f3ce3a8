"""Rows of a plan are simulations, and its first rows are those of a plan that simulates every layout."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from repro.config import Experiment, Training, models, systems
from repro.simulate.plan.candidates import PlanRequest, communicator_bytes
from repro.simulate.plan.plan import COMPARED_ROWS, search_layouts
from repro.simulate.plan.rows import FULL, OK, OPEN, PlanRow, plan_entry
from repro.simulate.step import simulate
from repro.util.processes import Workers
from tests.simulate.plan.layouts import MODELS


def asked(model: str, system: str, gpus: int, memory: int, **given: object) -> PlanRequest:
    on, sizes = systems.load_system_file(system), replace(MODELS[model], layers=4)
    return PlanRequest(sizes, on, gpus, on.context() + memory, sizes.seq, given)


EQUAL_KEYS = ("outcome", "reason", "model", "system", "gpus", "layout", "params", "memory", "comm", "time")


def assert_is_simulation(request: PlanRequest, row: PlanRow, *, interval: bool) -> None:
    """The entry of `row` has the values of `repro simulate --json` for the same layout, less its communicators."""
    experiment = Experiment(
        name="simulate",
        model=request.model,
        layout=row.layout,
        training=Training(seq=request.seq),
        system=request.system.name,
    )
    further = communicator_bytes(row.layout, request.system)
    limit = request.limit - further
    found = simulate(experiment, request.system, memory_limit=limit, time=True, interval=interval).as_dict()
    found["memory"]["communicator_bytes"] = further
    entry = plan_entry(request, row)
    assert row.evidence == FULL
    for key in EQUAL_KEYS:
        assert json.loads(json.dumps(entry[key])) == json.loads(json.dumps(found[key])), key


FEW = [
    ("gpt", "dgx2", 4, {"micro_batch": 1, "zero": 1, "recompute": False}),
    ("llama", "selene", 8, {"tp": 2, "micro_batch": 2, "zero": 1, "grad_dtype": "fp32"}),
    ("gpt", "selene", 4, {"tp": 2, "zero": 1, "kernels": "softmax", "recompute": "selective"}),
]
MANY: list[tuple[str, str, int, dict[str, Any]]] = [
    ("gpt", "selene", 8, {}),
    ("wide", "dgx-h100", 16, {"recompute": False}),
    ("llama", "dgx2", 8, {}),
    ("neox", "selene", 16, {"tp": 2}),
    ("falcon", "dgx-h100", 8, {"kernels": "softmax"}),
    ("gpt", "dgx-h100", 8, {"grad_dtype": "fp32", "zero": 2}),
]


@pytest.mark.parametrize(
    ("model", "system", "gpus", "given", "least"),
    [
        *(pytest.param(*case, 6) for case in FEW),
        *(pytest.param(*case, 40, marks=pytest.mark.slow) for case in MANY),
    ],
)
def test_every_row_is_a_simulation(
    model: str, system: str, gpus: int, given: dict[str, Any], least: int
) -> None:
    """A row must not depend on its process, nor on the layouts that this process simulated before."""
    request = asked(model, system, gpus, 10**9, **given)
    with Workers(1 if least == 6 else 2) as workers:
        found = search_layouts(request, workers, 2)
    simulated = [row for row in found.rows if row.evidence == FULL]
    assert len(simulated) == found.simulated >= least
    assert not any(row.outcome == OPEN for row in found.rows)
    for place, row in enumerate(simulated):
        assert_is_simulation(request, row, interval=row.outcome == OK and place < COMPARED_ROWS)


BUFFERS = 16 * 2 * 4 * 2**20
"""NCCL's buffers of a communicator; a layout of tp and dp has two more than one of dp."""
CASES = {
    "times": asked("wide", "dgx2", 8, 10**10, global_batch=16, sp=False, zero=1, recompute=False),
    "tight": asked("gpt", "selene", 8, 120_000_000 + 2 * BUFFERS, global_batch=64, micro_batch=4, zero=1),
    "rates": asked("llama", "dgx2", 8, 10**9, global_batch=16, zero=1, recompute=False),
}
"""`rates`: of a system without a bandwidth of memory, rows are ordered by peak rates."""


@pytest.mark.parametrize("name", CASES)
def test_the_first_rows_are_those_of_a_plan_that_simulates_every_layout(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[search_layouts.__module__], "COMPARED_ROWS", 3)
    request = CASES[name]
    if name == "rates":
        unknown = replace(request.system.device.memory_bandwidth, value=None)
        device = replace(request.system.device, memory_bandwidth=unknown)
        request = replace(request, system=replace(request.system, device=device))
    with Workers(1) as workers:
        every = search_layouts(request, workers, 3)
        few = search_layouts(request, workers, 3, exhaustive=False)
    assert bool(few.no_time) == (name == "rates")
    fits = [row for row in every.rows if row.outcome == OK]
    assert len(fits) > 6
    for row, other in zip(fits[:3], few.rows, strict=False):
        assert other.outcome == OK
        assert replace(row, trace_seconds=0) == replace(other, trace_seconds=0)
    assert few.simulated < every.simulated
    left = [row for row in few.rows if row.outcome == OPEN]
    assert len(left) + few.simulated == every.simulated
    assert all(row.least_s >= max(first.seconds for first in few.rows[:3]) for row in left)
    # No open layout would have been among the first.
    seconds = {row.layout: row.seconds for row in fits}
    assert all(row.least_s <= seconds[row.layout] for row in left if row.layout in seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "system", "gpus"), [("megatron-175b", "selene", 1024), ("llama3-405b", "llama3-h100", 16384)]
)
def test_a_plan_simulates_at_most_twice_its_rows(model: str, system: str, gpus: int) -> None:
    sizes, on = models.load_model(model), systems.load_system_file(system)
    request = PlanRequest(sizes, on, gpus, int(on.device.memory_bytes.value or 0), sizes.seq)
    with Workers(1) as workers:
        found = search_layouts(request, workers, COMPARED_ROWS, exhaustive=False)
    assert COMPARED_ROWS < found.simulated <= 2 * COMPARED_ROWS
