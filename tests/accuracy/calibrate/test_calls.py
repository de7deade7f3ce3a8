"""Every operator of a traced step runs on real tensors, and is counted as the trace counts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from repro.accuracy.calibrate import clock as clock_module
from repro.accuracy.calibrate import plan, target
from repro.accuracy.calibrate.calls import bind, calls_of, choose
from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.simulate.trace.events import Operator
from repro.simulate.trace.roles import roles, trace
from tests.training import tiny

CPU = torch.device("cpu")
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
    calls = calls_of(experiment, gloo=True)
    traced = {
        (event.name, event.read, event.written, event.flops)
        for role in roles(experiment)
        for event in trace(experiment, role, gloo=True).events
        if isinstance(event, Operator)
    }
    assert {(c.name, c.operator.read, c.operator.written, c.operator.flops) for c in calls} == traced
    generator = torch.Generator().manual_seed(0)
    for call in calls:
        out = bind(call, CPU, generator)()
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and "empty" not in call.name:
                assert tensor.isfinite().all(), call


def test_operands_are_distributed_as_in_training() -> None:
    """Normal numbers with mean 0; second moments and sums of exponentials are positive."""
    given: dict[str, list[torch.Tensor]] = {}

    def remember(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> None:
            given.setdefault(name, []).extend(leaf for leaf in tree_leaves(args) if torch.is_tensor(leaf))

        return function

    generator = torch.Generator().manual_seed(0)
    for call in calls_of(tiny(LAYOUTS["dp"]), gloo=True):
        if call.name in ("aten.mm", "repro.adamw_", "repro.cross_entropy_backward_"):
            bind(replace(call, function=remember(call.name)), CPU, generator)()
    factors = torch.cat([tensor.flatten() for tensor in given["aten.mm"]])
    assert abs(factors.mean()) < 0.02
    assert abs(factors.std() - 1) < 0.02
    moments = [tensor for tensor in given["repro.adamw_"] if tensor.dim()]
    assert sum(bool((tensor >= 0).all()) for tensor in moments) * 4 == len(moments), "one of four lists"
    assert bool((given["repro.cross_entropy_backward_"][2] > 0).all())


def test_every_call_is_seen_after_its_block_was_traced_before() -> None:
    """A trace repeats the events of blocks that it knows; their operators are not called then."""
    experiment = tiny(LAYOUTS["dp"])
    for role in roles(experiment):
        trace(experiment, role, gloo=True)
    names = {call.name for call in calls_of(experiment, gloo=True)}
    assert {"aten.mm", "aten.addmm", "repro.bias_gelu"} <= names


def test_the_chosen_sizes_span_all() -> None:
    calls = [call for call in calls_of(tiny(LAYOUTS["dp"]), gloo=True) if call.name == "aten.mm"]
    chosen = choose(calls, 3)
    assert len(chosen) == 3
    sizes = [call.nbytes for call in calls]
    assert {min(sizes), max(sizes)} <= {call.nbytes for call in chosen}
    assert len(choose(calls[:1], 3)) == 1


def test_what_is_planned_covers_every_strategy() -> None:
    """One process, an odd number, a power of two: each has what its devices allow, all with the same repeats."""
    for ranks in (1, 2, 3, 4, 8):
        found = plan.step_experiments("local", ranks, "fp32", quick=False)
        assert {experiment.layout.world for experiment in found} == {ranks}
        assert {experiment.training.steps for experiment in found} == {plan.REPEATS}
        assert any(experiment.layout.zero == 3 for experiment in found)
        assert any(experiment.layout.pp > 1 for experiment in found) == (ranks > 1)
        assert any(experiment.layout.sp for experiment in found) == (ranks in (2, 4, 8))


def test_tensor_parallelism_stays_on_a_node() -> None:
    found = plan.step_experiments("local", 8, "fp32", quick=False, per_node=2)
    assert {(e.layout.tp, e.layout.dp) for e in found if e.layout.tp > 1} == {(2, 4)}
    assert {e.layout.world for e in found} == {8}


def test_the_clock_sees_what_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """More work takes longer, and the quartiles are about the median: in seconds of this thread's processor, of which
    what else runs here takes none."""
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=time.thread_time))
    clock = OperatorClock(CPU, meshes.single_rank_mesh().world, repeats=3)
    assert clock.cache > 0
    small, large = (torch.ones(n, n) for n in (32, 512))
    short = clock.time(lambda: lambda: small @ small, 3 * small.nbytes)
    long = clock.time(lambda: lambda: large @ large, 3 * large.nbytes)
    assert long.median > 10 * short.median
    assert long.low <= long.median <= long.high
    assert long.spread >= 0


def test_ranks_that_share_a_cache_flush_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine of two cores may be told of the 480 MB of its host: of sixteen ranks each flushes a part."""
    monkeypatch.setattr(clock_module, "cache_bytes", lambda device: 2**20)
    alone, one_of_eight = (
        OperatorClock(CPU, meshes.single_rank_mesh().world, repeats=1, neighbours=n) for n in (1, 8)
    )
    assert (alone.cache, one_of_eight.cache) == (2**20, 2**17)
    assert alone._wipe.nbytes == 8 * one_of_eight._wipe.nbytes > 2**20


def test_a_call_finds_neither_its_operands_nor_the_memory_of_its_result_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock_module, "cache_bytes", lambda device: 2**20)
    read: list[int] = []
    written: list[int] = []

    def make() -> Callable[[], torch.Tensor]:
        operand = torch.ones(2**15)  # read and written, a quarter of the cache

        def call() -> torch.Tensor:
            result = operand + 1
            read.append(operand.data_ptr())
            written.append(result.data_ptr())
            return result

        return call

    clock = OperatorClock(CPU, meshes.single_rank_mesh().world, repeats=3)
    clock.time(make, 2**18)
    for places in (read, written):
        assert all(len(set(places[i : i + 5])) == 5 for i in range(len(read) - 15, len(read) - 5))


def test_a_core_s_products_are_measured_as_a_run_measures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one rank a core, as `rank_flops_per_s` starts them: ranks that take turns on a core would say less of it."""
    monkeypatch.setattr(target.compute_rate, "core_flops_per_s", lambda: 5e9)
    group = meshes.single_rank_mesh().world
    found = [target.products_of_a_core(place, 2, group) for place in range(4)]
    assert found == [5e9, 5e9, None, None]


class Busy:
    """Calls that take a millisecond of the processor each, and a time that goes on by `wall_s` meanwhile."""

    def __init__(self, wall_s: float):
        self.wall_s, self.calls = wall_s, 0

    def __call__(self, number: int = 0) -> None:
        self.calls += 1

    def perf_counter(self) -> float:
        return self.calls * self.wall_s

    def thread_time(self) -> float:
        return self.calls * 1e-3


@pytest.mark.parametrize("wall_s", [1e-3, 4e-3, 1.0])
def test_a_crowded_clock_says_what_an_equal_part_of_a_core_takes(
    monkeypatch: pytest.MonkeyPatch, wall_s: float
) -> None:
    """Whether a rank had the core to itself all the while, its part of it, or hardly any."""
    monkeypatch.setattr(clock_module, "usable_cores", lambda: 2)
    clock = OperatorClock(CPU, meshes.single_rank_mesh().world, repeats=2, neighbours=8)
    busy = Busy(wall_s)
    monkeypatch.setattr(clock_module, "time", busy)
    assert clock.in_a_crowd(busy, alone=lambda: 0.0) == pytest.approx(4e-3)
    assert busy.calls == pytest.approx(max(1, clock_module.CROWDED_S / wall_s), abs=1)


def test_ranks_with_a_core_each_are_timed_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "usable_cores", lambda: 2)
    clock = OperatorClock(CPU, meshes.single_rank_mesh().world, repeats=2, neighbours=2)
    busy = Busy(3e-3)
    monkeypatch.setattr(clock_module, "time", busy)
    assert clock.time(lambda: busy, 8).median == pytest.approx(3e-3)
