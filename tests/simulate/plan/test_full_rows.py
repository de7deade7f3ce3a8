"""Tests that rows of a plan equal simulations, also the first rows of a plan that does not simulate every layout."""

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


def plan_request(model: str, system: str, gpus: int, memory: int, **given: object) -> PlanRequest:
    loaded, sizes = systems.load_system_file(system), replace(MODELS[model], layers=4)
    return PlanRequest(sizes, loaded, gpus, loaded.context() + memory, sizes.seq, given)


EQUAL_KEYS = ("outcome", "reason", "model", "system", "gpus", "layout", "params", "memory", "comm", "time")


def assert_equals_simulation(request: PlanRequest, row: PlanRow, *, interval: bool) -> None:
    """Require that the entry of `row` equals `repro simulate --json` with a limit less the communicator bytes."""
    training, system = Training(seq=request.seq), request.system.name
    experiment = Experiment(
        name="simulate", model=request.model, layout=row.layout, training=training, system=system
    )
    communicators = communicator_bytes(row.layout, request.system)
    limit = request.limit - communicators
    found = simulate(experiment, request.system, memory_limit=limit, time=True, interval=interval).as_dict()
    found["memory"]["communicator_bytes"] = communicators
    entry = plan_entry(request, row)
    assert row.evidence == FULL
    for key in EQUAL_KEYS:
        assert json.loads(json.dumps(entry[key])) == json.loads(json.dumps(found[key])), key


def slow(*case: object) -> Any:
    return pytest.param(*case, 40, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "system", "gpus", "given", "min_rows"),
    [
        ("gpt", "dgx2", 4, {"micro_batch": 1, "zero": 1, "recompute": False}, 6),
        ("llama", "selene", 8, {"tp": 2, "micro_batch": 2, "zero": 1, "grad_dtype": "fp32"}, 6),
        ("gpt", "selene", 4, {"tp": 2, "zero": 1, "kernels": "softmax", "recompute": "selective"}, 6),
        slow("gpt", "selene", 8, {}),
        slow("wide", "dgx-h100", 16, {"recompute": False}),
        slow("llama", "dgx2", 8, {}),
        slow("neox", "selene", 16, {"tp": 2}),
        slow("falcon", "dgx-h100", 8, {"kernels": "softmax"}),
        slow("gpt", "dgx-h100", 8, {"grad_dtype": "fp32", "zero": 2}),
    ],
)
def test_every_row_equals_a_simulation_of_its_layout(
    model: str, system: str, gpus: int, given: dict[str, Any], min_rows: int
) -> None:
    """A row must not depend on its process or on the layouts that its process has simulated."""
    request = plan_request(model, system, gpus, 10**9, **given)
    with Workers(1 if min_rows == 6 else 2) as workers:
        found = search_layouts(request, workers, 2)
    simulated = [row for row in found.rows if row.evidence == FULL]
    assert len(simulated) == found.simulated >= min_rows
    assert not any(row.outcome == OPEN for row in found.rows)
    for position, row in enumerate(simulated):
        assert_equals_simulation(request, row, interval=row.outcome == OK and position < COMPARED_ROWS)


BUFFERS = 16 * 2 * 4 * 2**20
"""Bytes of NCCL's buffers per communicator. A layout with tp and dp has two communicators more than with dp alone."""
CASES = {
    "times": plan_request("wide", "dgx2", 8, 10**10, global_batch=16, sp=False, zero=1, recompute=False),
    "tight": plan_request(
        "gpt", "selene", 8, 12 * 10**7 + 2 * BUFFERS, global_batch=64, micro_batch=4, zero=1
    ),
    "rates": plan_request("llama", "dgx2", 8, 10**9, global_batch=16, zero=1, recompute=False),
}
"""Requests of plans. In `rates`, the system has no memory bandwidth, so rows are ordered by peak rates."""


@pytest.mark.parametrize("name", CASES)
def test_first_rows_do_not_depend_on_exhaustive_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[search_layouts.__module__], "COMPARED_ROWS", 3)
    request = CASES[name]
    if name == "rates":
        unknown = replace(request.system.device.memory_bandwidth, value=None)
        device = replace(request.system.device, memory_bandwidth=unknown)
        request = replace(request, system=replace(request.system, device=device))
    with Workers(1) as workers:
        exhaustive = search_layouts(request, workers, 3)
        partial = search_layouts(request, workers, 3, exhaustive=False)
    assert ("memory_bandwidth" in partial.no_time) == (name == "rates")
    assert any(row.time for row in partial.rows) == (name != "rates")
    fits = [row for row in exhaustive.rows if row.outcome == OK]
    assert len(fits) > 6
    compared = [(row.interval is not None, plan_entry(request, row)["undecided"] is not None) for row in fits]
    assert compared == [(name != "rates",) * 2] * 3 + [(False, False)] * (len(fits) - 3)
    first = [[replace(row, trace_seconds=0) for row in rows[:3]] for rows in (fits, partial.rows)]
    assert first[0] == first[1]
    assert partial.simulated < exhaustive.simulated
    open_rows = [row for row in partial.rows if row.outcome == OPEN]
    assert len(open_rows) + partial.simulated == exhaustive.simulated
    assert all(row.least_s >= max(first.seconds for first in partial.rows[:3]) for row in open_rows)
    # The lower bound of an open layout is at most its simulated time.
    seconds = {row.layout: row.seconds for row in fits}
    assert all(row.least_s <= seconds[row.layout] for row in open_rows if row.layout in seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "system", "gpus"), [("megatron-175b", "selene", 1024), ("llama3-405b", "llama3-h100", 16384)]
)
def test_a_plan_simulates_at_most_twice_its_rows(model: str, system: str, gpus: int) -> None:
    sizes, loaded = models.load_model(model), systems.load_system_file(system)
    request = PlanRequest(sizes, loaded, gpus, int(loaded.device.memory_bytes.value or 0), sizes.seq)
    with Workers(1) as workers:
        found = search_layouts(request, workers, COMPARED_ROWS, exhaustive=False)
    assert COMPARED_ROWS < found.simulated <= 2 * COMPARED_ROWS
