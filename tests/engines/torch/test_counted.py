"""Tests of messages of DTensor and of torch pipelines with external counters."""

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
from tests.pool import RankPool
from tests.training import TINY, micro_batches, tiny

pytestmark = needs("torch")
Messages = dict[tuple[str, str], tuple[int, int]]


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
    return {
        key: ((calls - few[key][0]) // 2, (payload - few[key][1]) // 2)
        for key, (calls, payload) in many.items()
    }


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


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_dtensor_sends_four_all_reduces_per_layer(two: RankPool, engine: str) -> None:
    """Two all-reduces in forward and two in backward have the size of x (1909.08053 sec. 3)."""
    rows = per_layer(two, Layout(tp=2, micro_batch=4), engine)
    assert {key for key, (_, payload) in rows.items() if payload} == {("tp", "all_reduce")}
    calls, payload = rows["tp", "all_reduce"]
    assert calls == 4
    assert 4 * BOUNDARY_BYTES <= payload < 4 * BOUNDARY_BYTES + VECTOR_BYTES


def test_torch_recomputation_omits_the_last_all_reduce(two: RankPool) -> None:
    """Recomputation stops at the last tensor that backward needs, one all-reduce earlier than in engine native."""
    layout = Layout(tp=2, micro_batch=4, recompute=True)
    calls = [per_layer(two, layout, engine)["tp", "all_reduce"][0] for engine in ("torch", "native")]
    assert calls == [5, 6]


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
