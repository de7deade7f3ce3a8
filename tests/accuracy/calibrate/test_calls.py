"""Tests of calibration calls: each operator of a traced step runs on tensors, with the bytes and FLOP of the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from repro.accuracy.calibrate import clock as clock_module
from repro.accuracy.calibrate import target
from repro.accuracy.calibrate.calls import bind, calls_of, choose
from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.simulate.trace.events import Operator
from repro.simulate.trace.roles import roles, trace
from tests.training import tiny

CPU, WORLD = torch.device("cpu"), meshes.single_rank_mesh().world
LAYOUTS = {
    "dp": Layout(dp=2, zero=1, global_batch=6),
    "zero3": Layout(dp=2, zero=3, recompute=True, global_batch=6),
    "sp": Layout(tp=2, sp=True, global_batch=3),
    "pp": Layout(pp=2, global_batch=4),
    "unfused": Layout(kernels="unfused", global_batch=3),
    "softmax": Layout(kernels="softmax", global_batch=3),
    "fp16": Layout(precision="fp16", global_batch=3),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_traced_operator_runs(layout: Layout) -> None:
    experiment = tiny(layout, dropout=0.1)
    traced = {
        (event.name, event.read, event.written, event.flops)
        for role in roles(experiment)
        for event in trace(experiment, role, gloo=True).events
        if isinstance(event, Operator)
    }
    # A trace repeats the events of a known block without its operators. The calls contain them nevertheless.
    calls = calls_of(experiment, gloo=True)
    assert {(c.name, c.operator.read, c.operator.written, c.operator.flops) for c in calls} == traced
    generator = torch.Generator().manual_seed(0)
    for call in calls:
        out = bind(call, CPU, generator)()
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and "empty" not in call.name:
                assert tensor.isfinite().all(), call


def test_operands_are_distributed_as_in_training() -> None:
    """Operands are normal with mean 0. Second moments and sums of exponentials are positive."""
    operands: dict[str, list[torch.Tensor]] = {}

    def record(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> None:
            operands.setdefault(name, []).extend(leaf for leaf in tree_leaves(args) if torch.is_tensor(leaf))

        return function

    generator = torch.Generator().manual_seed(0)
    for call in calls_of(tiny(LAYOUTS["dp"]), gloo=True):
        if call.name in ("aten.mm", "repro.adamw_", "repro.cross_entropy_backward_"):
            bind(replace(call, function=record(call.name)), CPU, generator)()
    factors = torch.cat([tensor.flatten() for tensor in operands["aten.mm"]])
    assert abs(factors.mean()) < 0.02
    assert abs(factors.std() - 1) < 0.02
    moments = [tensor for tensor in operands["repro.adamw_"] if tensor.dim()]
    assert sum(bool((tensor >= 0).all()) for tensor in moments) * 4 == len(moments), "one of four lists"
    assert bool((operands["repro.cross_entropy_backward_"][2] > 0).all())


def test_chosen_sizes_include_the_smallest_and_largest() -> None:
    calls = [call for call in calls_of(tiny(LAYOUTS["dp"]), gloo=True) if call.name == "aten.mm"]
    chosen = choose(calls, 3)
    assert len(chosen) == 3
    sizes = [call.nbytes for call in calls]
    assert {min(sizes), max(sizes)} <= {call.nbytes for call in chosen}
    assert len(choose(calls[:1], 3)) == 1


def test_ranks_that_share_a_cache_each_flush_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine with two cores may report the 480 MB cache of its host, too much for each of sixteen ranks."""
    monkeypatch.setattr(clock_module, "cache_bytes", lambda device: 2**20)
    single, one_of_eight = (OperatorClock(CPU, WORLD, repeats=1, neighbours=n) for n in (1, 8))
    assert (single.cache, one_of_eight.cache) == (2**20, 2**17)
    assert single._wipe.nbytes == 8 * one_of_eight._wipe.nbytes > 2**20
    monkeypatch.undo()
    assert clock_module.cache_bytes(CPU) > 0


def test_operands_and_results_of_a_call_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "cache_bytes", lambda device: 2**20)
    read, written = list[int](), list[int]()

    def make_call() -> Callable[[], torch.Tensor]:
        operand = torch.ones(2**15)  # a quarter of the cache, with the result

        def call() -> torch.Tensor:
            result = operand + 1
            read.append(operand.data_ptr())
            written.append(result.data_ptr())
            return result

        return call

    OperatorClock(CPU, WORLD, repeats=3).time(make_call, 2**18)
    for addresses in (read, written):
        assert all(len(set(addresses[i : i + 5])) == 5 for i in range(len(read) - 15, len(read) - 5))


def test_one_rank_per_core_measures_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rank_flops_per_s` also starts one rank per core; ranks that share a core would measure a lower rate."""
    monkeypatch.setattr(target.compute_rate, "core_flops_per_s", lambda: 5e9)
    found = [target.products_of_a_core(place, 2, WORLD) for place in range(4)]
    assert found == [5e9, 5e9, None, None]


class Busy:
    """Calls of 1 ms CPU time each, and a clock that advances by `wall_s` per call."""

    def __init__(self, wall_s: float):
        self.wall_s, self.calls = wall_s, 0

    def __call__(self, number: int = 0) -> None:
        self.calls += 1

    def perf_counter(self) -> float:
        return self.calls * self.wall_s

    def thread_time(self) -> float:
        return self.calls * 1e-3


@pytest.mark.parametrize("wall_s", [1e-3, 4e-3, 1.0])
def test_crowded_clock_measures_time_at_an_equal_core_share(
    monkeypatch: pytest.MonkeyPatch, wall_s: float
) -> None:
    """The result does not depend on whether the rank had the full core, its share or less during the measurement.

    Ranks with a core each use wall time.
    """
    monkeypatch.setattr(clock_module, "usable_cores", lambda: 2)
    crowded, alone = (OperatorClock(CPU, WORLD, repeats=2, neighbours=count) for count in (8, 2))
    busy = Busy(wall_s)
    monkeypatch.setattr(clock_module, "time", busy)
    assert crowded.in_a_crowd(busy, alone=lambda: 0.0) == pytest.approx(4e-3)
    assert busy.calls == pytest.approx(max(1, clock_module.CROWDED_S / wall_s), abs=1)
    assert alone.time(lambda: busy, 8).median == pytest.approx(wall_s)
