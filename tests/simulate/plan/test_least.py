"""What no step takes less than, and plans that time no more layouts than they must."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.simulate.plan.candidates import PlanRequest
from repro.simulate.plan.extrapolation.linear import lower_bound
from repro.simulate.plan.extrapolation.lower_bound import SystemRates
from repro.simulate.plan.extrapolation.step_time import StepTimes
from repro.simulate.plan.plan import search_layouts
from repro.simulate.plan.planner import MIN_FULL_OVER_SHALLOW, Planner
from repro.simulate.plan.rows import OK, SHALLOW, STATES, PlanRow
from repro.simulate.time.predict import predict
from repro.util.workers import Workers
from tests.simulate.families import families_of

MODEL = Model(name="small", layers=12, hidden=2048, heads=16, vocab=51200, seq=1024)
LLAMA = replace(MODEL, norm="rms", positions="rotary", mlp="swiglu", kv_heads=4, biases="none")
BASE = Layout(dp=8, micro_batch=2, global_batch=96)
LAYOUTS = {
    "one": replace(BASE, dp=1, global_batch=2),
    "z0": BASE,
    "z3": replace(BASE, zero=3, micro_batch=4),
    "z3-wide": replace(BASE, zero=3, micro_batch=3, recompute=True),
    "tp8-sp": replace(BASE, tp=8, sp=True, zero=1),
    "tp8-waits": replace(BASE, tp=8, tp_overlap=False, micro_batch=1),
    "tp2-pa-z2": replace(BASE, tp=2, recompute=True, pa=True, zero=2),
    "pp2-one": replace(BASE, pp=2, dp=8, global_batch=32),
    "pp3-z2": replace(BASE, pp=3, dp=4, zero=2, micro_batch=4),
    "pp12-tp2": replace(BASE, pp=12, tp=2, dp=2, zero=1),
    "gpipe": replace(BASE, pp=4, dp=2, schedule="gpipe"),
    "interleaved": replace(BASE, pp=2, dp=4, schedule="interleaved", chunks=2),
    "cp4": replace(BASE, cp=4, dp=4, zero=1, micro_batch=1),
}
SEND = {
    "z0-sends": replace(BASE, dp=64, micro_batch=1, global_batch=64),
    "z1-sends": replace(BASE, dp=64, zero=1, micro_batch=1, global_batch=64),
    "z1-late-sends": replace(BASE, dp=64, zero=1, micro_batch=1, global_batch=128, gather_overlap=False),
    "z2-sends": replace(BASE, dp=64, zero=2, micro_batch=1, global_batch=512),
    "z2-pp4-sends": replace(BASE, pp=4, dp=64, zero=2, micro_batch=1, global_batch=1024),
    "z2-chunks-sends": replace(
        BASE, pp=2, dp=32, zero=2, micro_batch=1, global_batch=512, schedule="interleaved", chunks=2
    ),
    "z3-sends": replace(BASE, dp=64, zero=3, micro_batch=1, global_batch=256),
    "z3-rc-sends": replace(BASE, dp=32, zero=3, micro_batch=1, global_batch=32, recompute=True, tp=2),
}
"""Whose gradients and parameters take longer than what is computed, between nodes with few adapters: on `dgx2`."""
LAYOUTS |= SEND


ON = (("dgx2", MODEL), ("dgx-h100", LLAMA))
TAKEN = [
    pytest.param(*on, name, id=f"{on[0]}-{name}", marks=pytest.mark.slow if (i + j) % 2 else ())
    for j, name in enumerate(LAYOUTS)
    for i, on in enumerate(ON)
]
"""Of each layout one of both is quick."""


@pytest.mark.parametrize(("system", "model", "name"), TAKEN)
def test_no_step_takes_less(name: str, system: str, model: Model) -> None:
    """The whole step's schedule, and what a plan makes of shallow ones; the least is no empty promise either."""
    on = systems.load_system_file(system)
    layout = replace(LAYOUTS[name], precision=on.best_precision)
    families, _ = families_of(model, layout)
    least = lower_bound(model, layout, families, SystemRates(on))
    whole = predict(Experiment(name="x", model=model, layout=layout), on).step_s
    assert least <= whole
    assert least <= StepTimes(model, model.seq, on).of_layout(layout, families)["step_s"] * (1 + 1e-3)
    assert least > (0.6 if system == "dgx2" and name in SEND else 0.2) * whole


def asked(gpus: int, limit: int, system: str = "dgx2", **given: object) -> PlanRequest:
    on = systems.load_system_file(system)
    model = replace(MODEL, layers=4, hidden=1024, heads=4, vocab=8192, seq=256)
    return PlanRequest(model, on, gpus, on.context() + limit, model.seq, dict(given))


@pytest.mark.parametrize(
    "request_",
    [
        asked(8, 10**9, global_batch=32, sp=False, zero=1, tp=1),
        pytest.param(asked(8, 500_000_000, global_batch=64, micro_batch=4), marks=pytest.mark.slow),
    ],
    ids=("few", "tight"),
)
def test_the_first_rows_are_those_of_a_plan_that_times_every_layout(
    request_: PlanRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[PlanRow] = []
    time = Planner.time

    def counted(self: Planner, rows: list[PlanRow]) -> None:
        timed.extend(rows)
        time(self, rows)

    monkeypatch.setattr(Planner, "time", counted)
    monkeypatch.setattr(sys.modules[search_layouts.__module__], "COMPARED_ROWS", 3)
    with Workers(1) as workers:
        whole = search_layouts(request_, workers, 3)
        every, timed = len(timed), []
        few = search_layouts(request_, workers, 3, whole=False)
    fits = [row for row in whole.rows if row.outcome == OK]
    assert len(fits) > 6
    for row, other in zip(fits[:3], few.rows, strict=False):
        assert (row.layout, row.time, row.memory, row.comm) == (
            other.layout,
            other.time,
            other.memory,
            other.comm,
        )
    assert len(few.rows) == len(whole.rows)
    third = few.rows[2].seconds
    assert all(row.least_s >= third for row in few.rows if row.open)
    assert not any(row.open for row in whole.rows)
    # What the busiest of their ranks sends takes a trace of a middle stage, and nobody asks.
    assert any(row.open and not row.time and row.layout.pp > 2 for row in few.rows)
    assert not any(row.comm for row in few.rows[3:] if row.open and not row.time)
    assert all(row.comm for row in whole.rows if row.evidence != STATES)
    assert len(timed) < every


def test_the_allocator_is_asked_only_for_rows_that_may_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row near the limit is timed from shallow traces first, and open as far as these may be wrong."""
    planner = Planner(asked(8, 10**9), Workers(1))
    live = planner.request.allocatable
    rows = [
        PlanRow(BASE, OK, SHALLOW, {"peak_bytes": live - 1}, open=True),
        PlanRow(replace(BASE, zero=1), OK, SHALLOW, {"peak_bytes": live // 2}, open=True),
    ]
    traced: list[PlanRow] = []

    def time(some: list[PlanRow]) -> None:
        for row in some:
            row.time = {"step_s": 2.0}

    def begin_full(some: list[PlanRow]) -> Callable[[], list[PlanRow]]:
        traced.extend(some)
        return lambda: some

    monkeypatch.setattr(planner, "time", time)
    monkeypatch.setattr(planner, "begin_full", begin_full)
    close, far = planner.decide(rows)
    assert (close.open, far.open, traced) == (True, False, [])
    assert close.seconds == MIN_FULL_OVER_SHALLOW * 2.0
    assert far.seconds == 2.0
    planner.decide([close])
    assert traced == [close]
