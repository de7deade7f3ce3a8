"""Tests of megatron-core with external counters: bytes of states, messages of a layer, order of passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from repro.config import Layout
from repro.config.enums import Phase
from repro.parallel.pipeline.schedule import build_schedule, dependency_of
from tests.engines.megatron.both import build, needs_megatron
from tests.engines.runs import pool_of, result_of
from tests.engines.virtual_time import bubble_fraction, busy_and_idle
from tests.pool import RankPool
from tests.training import TINY, micro_batches, smallest, tiny

pytestmark = needs_megatron
B = 8


def run_experiment(layout: Layout, layers: int, engine: str = "megatron") -> dict[str, Any]:
    return result_of(tiny(layout, replace(TINY, layers=layers), engine, steps=4, untimed_steps=2))


STATES = {
    ("fp32", "precision", 0): (4, 4, 8),
    ("bf16", "precision", 0): (2, 4, 12),
    ("fp16", "precision", 0): (2, 2 + 4, 12),
    ("fp16", "fp32", 0): (2, 4, 12),
    ("fp32", "precision", 1): (4, 4, 8 / 2),
    ("bf16", "precision", 1): (2, 4, 12 / 2),
    ("fp16", "precision", 1): (2, 2 + 4 / 2, 12 / 2),
    ("fp16", "fp32", 1): (2, 4, 12 / 2),
}
"""Bytes per parameter on one of two replicas. The library documents sums of 16, 18 and 20 without its distributed
optimizer, and 8 + 8/d, 6 + 12/d and 4 + 16/d with the distributed optimizer. Gradients of bf16 are in fp32. Gradients
of fp16 are copied to fp32 for the update, unless `grad_dtype` is fp32."""


@pytest.mark.parametrize(("precision", "grad_dtype", "zero"), STATES)
def test_states_have_the_documented_bytes_per_parameter(
    two: RankPool, precision: str, grad_dtype: str, zero: int
) -> None:
    layout = Layout(dp=2, zero=zero, precision=precision, grad_dtype=grad_dtype, micro_batch=4)
    documented = STATES[precision, grad_dtype, zero]
    for result in two.run(run_experiment, layout, 4):
        psi, states = result["parameters"], result["memory"]["states"]
        expected = dict(zip(("parameters", "gradients", "optimizer"), documented, strict=True))
        assert {state: states[state] / psi for state in expected} == pytest.approx(expected, rel=0.03)
        assert result["memory"]["peak"]["total"] > sum(states.values()) - 4 * psi
        assert result["padding"] == (0 if zero == 0 else pytest.approx(0, abs=0.03 * psi))
        assert result["software"]["name"].startswith("Megatron-core 0.16")
        configuration = result["software"]["configuration"]["ddp"]
        assert configuration.get("use_distributed_optimizer", False) == (zero == 1)
        assert grad_dtype == "precision" or configuration["grad_reduce_in_fp32"]


def tp_messages(result: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Return calls and payload bytes over the tp group, by operation."""
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    for row in result["comm"]:
        if row["group"] == "tp":
            calls[row["op"]] += row["calls"]
            payload[row["op"]] += row["payload_bytes"]
    return calls, payload


LAYER_MESSAGES = {
    "tp": (Layout(tp=2, micro_batch=B), {"all_reduce": 4}),
    "sp": (Layout(tp=2, sp=True, micro_batch=B), {"all_gather": 4 + 2, "reduce_scatter": 4}),
    "recompute": (Layout(tp=2, recompute=True, micro_batch=B), {"all_reduce": 4 + 2}),
    "pa": (Layout(tp=2, recompute=True, pa=True, micro_batch=B), {"all_reduce": 4 + 2, "all_gather": 1}),
}
"""Messages of one layer in forward and backward (tp: 1909.08053 sec. 3; sp: 2205.05198 sec. 4.2.2, with two further
all-gathers of inputs for weight gradients; pa: 1910.02054 sec. 6.1). Recomputation repeats the forward pass."""


@pytest.mark.parametrize("name", LAYER_MESSAGES)
def test_layer_sends_the_published_number_of_messages(two: RankPool, name: str) -> None:
    """Each message is one activation, [b, s, h]. The difference of three and two layers gives one layer."""
    layout, expected = LAYER_MESSAGES[name]
    boundary = B * TINY.seq * TINY.hidden * 4
    for engine in ("megatron", "native"):
        (calls, payload), (calls_of_two, payload_of_two) = (
            tp_messages(two.run(run_experiment, layout, layers, engine)[0]) for layers in (3, 2)
        )
        assert calls - calls_of_two == Counter(expected), engine
        assert {op: payload[op] - payload_of_two[op] for op in expected} == {
            op: count * boundary for op, count in expected.items()
        }, engine


def test_selective_recomputation_saves_memory_at_equal_losses(two: RankPool) -> None:
    """The library recomputes its core attention and sends the same messages."""
    layout = Layout(tp=2, sp=True, micro_batch=B)
    plain, selective = (
        two.run(run_experiment, replace(layout, recompute=mode), 2)[0] for mode in ("none", "selective")
    )
    assert selective["loss"] == plain["loss"]
    assert selective["software"]["configuration"]["transformer"]["recompute_granularity"] == "selective"
    assert "recompute_granularity" not in plain["software"]["configuration"]["transformer"]
    assert selective["memory"]["peak"]["total"] < plain["memory"]["peak"]["total"]
    assert tp_messages(selective)[0] == tp_messages(plain)[0]


SCHEDULES = [
    Layout(pp=pp, schedule=schedule, chunks=chunks, micro_batch=1, global_batch=B)
    for pp in (2, 4)
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2))
]


def pass_order(layout: Layout) -> tuple[int, str, list[Phase]]:
    """Return the stage, the order in which its forward and backward passes begin, and its phases."""
    experiment = tiny(layout, smallest(layout), "megatron")
    engine, phases = build(experiment), list[Phase]()
    engine.step(micro_batches(experiment, 0, 0), phases.append)
    return engine.mesh.pp.rank, "".join(engine.passes.order), phases


def _waits(phases: list[Phase]) -> list[bool]:
    """Return for each pass whether the stage waited since the start of the preceding pass."""
    found, idle = [], False
    for phase in phases:
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            found.append(idle)
        idle = phase == Phase.IDLE
    return found


@pytest.mark.parametrize("layout", SCHEDULES, ids=lambda layout: f"{layout.schedule}-{layout.pp}")
def test_stages_run_the_schedules_of_engine_native(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The order of passes is that of `repro.parallel.pipeline.schedule`."""
    ours = build_schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
    for stage, order, phases in pool_of(request, layout).run(pass_order, layout):
        assert order == "".join(action.kind for action in ours[stage])
        received = [
            needed is not None and needed[0] != stage
            for needed in (dependency_of(action, stage, layout.pp, layout.chunks) for action in ours[stage])
        ]
        # A stage also waits for its sends, and finally for the gradients of all micro-batches.
        assert all(waited for waited, needed in zip(_waits(phases), received, strict=False) if needed)


@pytest.mark.parametrize("layout", SCHEDULES[:2], ids=lambda layout: layout.schedule)
def test_idle_time_of_stages_equals_the_bubble_formula(two: RankPool, layout: Layout) -> None:
    layout = replace(layout, global_batch=4)
    for busy, idle, _ in busy_and_idle(two, layout, "megatron"):
        assert idle / busy == pytest.approx(bubble_fraction(layout))
