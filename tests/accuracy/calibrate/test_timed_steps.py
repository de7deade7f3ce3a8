"""Tests of timed operators: calls with the bytes and FLOP of the trace, and timed steps without messages."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from repro.accuracy.calibrate import document
from repro.accuracy.calibrate.benchmarks import TIMED_STEPS, SilentTransport, time_silent_step
from repro.accuracy.calibrate.calls import bind, calls_of, choose
from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Layout
from repro.config.timing import OperatorRate
from repro.parallel import mesh as meshes
from repro.parallel.ledger import SEND
from repro.simulate.trace.events import Message, Operator
from repro.simulate.trace.roles import roles, trace
from tests.training import tiny

CPU = torch.device("cpu")
LAYOUTS = {
    "dp": Layout(dp=4, zero=1, global_batch=8),
    "zero3": Layout(dp=4, zero=3, recompute=True, global_batch=4),
    "tp": Layout(tp=2, dp=2, kernels="unfused", global_batch=2),
    "pp": Layout(pp=2, dp=2, global_batch=8),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_silent_step_calls_the_operators_of_the_real_step(layout: Layout) -> None:
    """A step has one interval of computation per message; their sum excludes the end of the step."""
    experiment = tiny(layout)
    clock = OperatorClock(CPU, meshes.single_rank_mesh().world, repeats=1, neighbours=64)
    found = time_silent_step(experiment, clock)
    traced = trace(experiment, roles(experiment)[0], gloo=True)
    expected, called = Counter[str](), Counter[str]()
    for times, operator in traced.operators():
        expected[operator.name] += times * operator.calls
    for name, _, _, times in found["operators"]:
        called[name] += times
    assert set(called) == set(expected)
    if traced.copies == 0:
        assert called == expected
    if layout.pp == 1:
        sent = sum(isinstance(event, Message) and event.op != SEND for event in traced.step)
        assert [len(parts) for parts in found["between"]] == [sent] * TIMED_STEPS
    assert 0 < sum(map(sum, found["between"])) / TIMED_STEPS <= found["seconds"]


@pytest.mark.parametrize(("jitter", "spread"), [(1e-3, 0.05), (1e-3, 0.0), (0.0, 0.05), (0.0, 0.0)])
def test_jitter_and_spread_of_ranks_are_recovered(jitter: float, spread: float) -> None:
    """Intervals are normal draws with variance `jitter` times their mean. The speed of ranks is a normal draw with
    deviation `spread`."""
    draw, ranks = random.Random(1), 64
    parts = [0.01, 0.04, 0.16] * 40

    def rank() -> dict[str, object]:
        slowdown = draw.gauss(1, spread)
        steps = [
            [slowdown * draw.gauss(mean, (jitter * mean) ** 0.5) for mean in parts]
            for _ in range(TIMED_STEPS)
        ]
        return {"between": steps, "seconds": sum(map(sum, steps)) / TIMED_STEPS}

    message = document._rank_differences([tuple(rank() for _ in range(ranks))])
    found = {key: number["value"] for key, number in message.items()}
    assert found["jitter_s"] == pytest.approx(jitter, rel=0.1, abs=1e-12)
    assert found["spread"] == pytest.approx(spread, rel=0.2, abs=3e-3)


def test_silent_messages_bring_no_subnormal_values() -> None:
    gathered, received = torch.full((2, 12), 1e-40)
    gathered[4:8] = torch.arange(1.0, 5)
    SilentTransport().all_gather(gathered, gathered[4:8]).wait()
    assert gathered.tolist() == [1, 2, 3, 4] * 3, "the parts of other ranks are copies of this rank's part"
    SilentTransport().receive(received, 1, 0).wait()
    assert received.tolist() == [0.5] * 12


def test_document_has_the_ratio_of_step_to_operator_seconds() -> None:
    rates = {"matmul": OperatorRate(fixed_s=1.0, per_flop_s=0.5), "elementwise": OperatorRate(fixed_s=2.0)}
    operators = [("aten.mm", 8.0, 6.0, 2), ("aten.add", 8.0, 0.0, 3)]  # 2 * (1 + 3) + 3 * 2 seconds

    def step(*by_rank: float) -> tuple[dict[str, object], ...]:
        return tuple({"operators": operators, "seconds": seconds} for seconds in by_rank)

    found = document._step([step(14.0, 17.5, 140.0), step(21.0, 24.5, 21.0)], rates)
    assert found[document.STEP] == pytest.approx((1.25 + 1.5) / 2)


CALLED = {
    "dp": Layout(dp=2, zero=1, global_batch=6),
    "zero3": Layout(dp=2, zero=3, recompute=True, global_batch=6),
    "sp": Layout(tp=2, sp=True, global_batch=3),
    "pp": Layout(pp=2, global_batch=4),
    **{kernels: Layout(kernels=kernels, global_batch=3) for kernels in ("unfused", "softmax")},
    "fp16": Layout(precision="fp16", global_batch=3),
}


@pytest.mark.parametrize("layout", CALLED.values(), ids=CALLED)
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
    for call in calls_of(tiny(CALLED["dp"]), gloo=True):
        if call.name in ("aten.mm", "repro.adamw_", "repro.cross_entropy_backward_"):
            bind(replace(call, function=record(call.name)), CPU, generator)()
    factors = torch.cat([tensor.flatten() for tensor in operands["aten.mm"]])
    assert abs(factors.mean()) < 0.02
    assert abs(factors.std() - 1) < 0.02
    moments = [tensor for tensor in operands["repro.adamw_"] if tensor.dim()]
    assert sum(bool((tensor >= 0).all()) for tensor in moments) * 4 == len(moments), "one of four lists"
    assert bool((operands["repro.cross_entropy_backward_"][2] > 0).all())


def test_chosen_sizes_include_the_smallest_and_largest() -> None:
    calls = [call for call in calls_of(tiny(CALLED["dp"]), gloo=True) if call.name == "aten.mm"]
    chosen = choose(calls, 3)
    assert len(chosen) == 3
    sizes = [call.nbytes for call in calls]
    assert {min(sizes), max(sizes)} <= {call.nbytes for call in chosen}
    assert len(choose(calls[:1], 3)) == 1


FAULTS = """
import resource, torch
from repro.accuracy.calibrate import benchmarks
from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Experiment, Layout, Model
from repro.util import processes
from repro.parallel import mesh as meshes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def counted(peak, count, reserve=processes.reserve_heap):
    global before
    reserve(peak, count)
    before = faults()

torch.set_num_threads(1)
processes.keep_freed_memory()
processes.reserve_heap, before = counted, None
model = Model(name="wide", layers=2, hidden=128, heads=4, vocab=64, seq=512)
layout = Layout(dp=4, zero=3, micro_batch=4, global_batch=16)
clock = OperatorClock(torch.device("cpu"), meshes.single_rank_mesh().world, repeats=1, neighbours=64)
benchmarks.time_silent_step(Experiment(name="one", model=model, layout=layout), clock)
print(faults() - before)
"""


def test_timed_steps_cause_no_page_faults() -> None:
    """A separate process counts the faults, because a heap that retains freed memory cannot be reset."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
