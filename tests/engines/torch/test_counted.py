"""Tests of states and messages of engine torch with external counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.engines import build_engine
from repro.measure.operators import CollectiveCounter
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.engines.runs import result_of
from tests.pool import RankPool
from tests.training import TINY, micro_batches, smallest, tiny

pytestmark = needs("torch")
COUNTER_BYTES = 2048
"""Upper bound on the bytes of AdamW's step counters, one fp32 number per parameter tensor."""
Messages = dict[tuple[str, str], tuple[int, ...]]


def second_step(layout: Layout, engine: str, layers: int) -> Messages:
    """Return calls and bytes of the second step by group and operation."""
    experiment = tiny(layout, replace(TINY, name=f"tiny-{layers}", layers=layers), engine)
    mesh = meshes.distributed_mesh(layout, "cpu")
    built = build_engine(experiment, mesh, torch.device("cpu"))
    batches = micro_batches(experiment, mesh.dp.rank, 0)
    built.step(batches, lambda phase: None)
    built.synchronize()
    with CollectiveCounter(mesh) as watch:
        built.step(batches, lambda phase: None)
        built.synchronize()
    found: Counter[Any] = Counter()
    for row in watch.ledger.rows():
        key = row["group"], row["op"]
        found[key, "calls"] += row["calls"]
        found[key, "bytes"] += row["payload_bytes"]
    return {key: (found[key, "calls"], found[key, "bytes"]) for key, unit in found if unit == "calls"}


def per_layer(pool: RankPool, layout: Layout, engine: str) -> Messages:
    """Return calls and bytes per layer on rank 0, half the difference of four and two layers."""
    few, many = (pool.run(second_step, layout, engine, layers)[0] for layers in (2, 4))
    return {key: tuple((a - b) // 2 for a, b in zip(many[key], few[key], strict=True)) for key in many}


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_fp32_gradients_have_twice_the_message_bytes(two: RankPool, zero: int) -> None:
    op = "reduce_scatter" if zero else "all_reduce"
    narrow = Layout(dp=2, zero=zero, precision="bf16", micro_batch=4)
    bytes_of = [
        two.run(second_step, layout, "torch", 2)[0]["dp", op][1]
        for layout in (narrow, replace(narrow, grad_dtype="fp32"))
    ]
    assert bytes_of[1] == pytest.approx(2 * bytes_of[0], rel=0.01)  # norm and loss are always fp32


BOUNDARY_BYTES = 4 * TINY.seq * TINY.hidden * 4
"""Bytes of x [b, s, h] for four samples in fp32."""
VECTOR_BYTES = 1024
"""Upper bound on the bytes of a layer's norm weights, their gradients and gradient norms."""


@pytest.mark.parametrize(
    ("engine", "recompute", "count"),
    [("torch", False, 4), ("native", False, 4), ("torch", True, 5), ("native", True, 6)],
)
def test_layer_sends_all_reduces_over_tp(two: RankPool, engine: str, recompute: bool, count: int) -> None:
    """Two all-reduces in forward and two in backward have the size of x (1909.08053 sec. 3).

    Recomputation in torch stops at the last tensor that backward needs, one all-reduce earlier than in engine native.
    """
    rows = per_layer(two, Layout(tp=2, micro_batch=4, recompute=recompute), engine)
    assert {key for key, (_, payload) in rows.items() if payload} == {("tp", "all_reduce")}
    calls, payload = rows["tp", "all_reduce"]
    assert calls == count
    assert count * BOUNDARY_BYTES <= payload < count * BOUNDARY_BYTES + VECTOR_BYTES


def test_sequence_parallelism_sends_all_gathers_and_reduce_scatters(two: RankPool) -> None:
    """All-reduces sum only the gradients of two norm weights and two norm biases per layer."""
    rows = per_layer(two, Layout(tp=2, sp=True, micro_batch=4), "torch")
    assert rows["tp", "all_gather"] == rows["tp", "reduce_scatter"] == (4, 4 * BOUNDARY_BYTES)
    calls, payload = rows["tp", "all_reduce"]
    assert calls == 4
    assert payload < VECTOR_BYTES


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_send_each_boundary_tensor_once(two: RankPool, schedule: str) -> None:
    """Four micro-batches cross the boundary in both directions; an all-reduce sums the tied embedding's gradient."""
    layout = Layout(pp=2, schedule=schedule, micro_batch=1, global_batch=4)
    for engine in ("torch", "native"):
        for rows in two.run(second_step, layout, engine, 2):
            assert rows["pp", "send"] == (4, BOUNDARY_BYTES)
            _, payload = rows["pp", "all_reduce"]
            assert payload == TINY.vocab * TINY.hidden * 4 + 8  # plus norm and loss


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_strategies_of_torch_have_the_expected_state_bytes(two: RankPool, zero: int) -> None:
    """Two ranks have 4 bytes per fp32 parameter, 4 per gradient and 8 per pair of moments, each in full or in shards.

    ZeroRedundancyOptimizer assigns full parameters to ranks, so that a rank may have more than half of the moments.
    """
    layout = Layout(dp=2, zero=zero, micro_batch=4)
    results = two.run(result_of, tiny(layout, smallest(layout), "torch", steps=5, untimed_steps=2))
    psi = results[0]["parameters"]
    for state, size in (("parameters", 4 * psi), ("gradients", 4 * psi), ("optimizer", 8 * psi)):
        bytes_by_rank = [result["memory"]["states"][state] for result in results]
        sharded = zero == 3 or (zero == 1 and state == "optimizer")
        full = sum(bytes_by_rank) if sharded else sum(bytes_by_rank) / 2
        assert size <= full <= size + 2 * COUNTER_BYTES, (state, bytes_by_rank)
    for result in results:
        states = sum(result["memory"]["states"].values())
        assert result["memory"]["peak"]["total"] > states > 0
        assert result["software"]["name"].startswith("torch 2")
        assert sum(row["sent_bytes"] for row in result["comm"] if row["group"] == "dp") >= 4 * psi
