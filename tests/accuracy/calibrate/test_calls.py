"""Tests of calibration calls: each operator of a traced step runs on tensors, with the bytes and FLOP of the trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from repro.accuracy.calibrate.calls import bind, calls_of, choose
from repro.config import Layout
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
