"""What the counters outside the engine see of DTensor and of torch's pipelines."""

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
Rows = dict[tuple[str, str], tuple[int, int]]


def seen(layout: Layout, engine: str, layers: int) -> Rows:
    """Calls and bytes of the second step by group and operation."""
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
    return {key: (found[key, "calls"], found[key, "bytes"]) for key, what in found if what == "calls"}


def per_layer(pool: RankPool, layout: Layout, engine: str) -> Rows:
    """What two layers more add, halved, on the first rank."""
    few, many = (pool.run(seen, layout, engine, layers)[0] for layers in (2, 4))
    return {
        key: ((calls - few[key][0]) // 2, (payload - few[key][1]) // 2)
        for key, (calls, payload) in many.items()
    }


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_fp32_gradients_are_reduced_in_twice_the_bytes(two: RankPool, zero: int) -> None:
    op = "reduce_scatter" if zero else "all_reduce"
    narrow = Layout(dp=2, zero=zero, precision="bf16", micro_batch=4)
    bytes_of = [
        two.run(seen, layout, "torch", 2)[0]["dp", op][1]
        for layout in (narrow, replace(narrow, grad_dtype="fp32"))
    ]
    assert bytes_of[1] == pytest.approx(2 * bytes_of[0], rel=0.01)  # norm and loss are always fp32


BOUNDARY = 4 * TINY.seq * TINY.hidden * 4
"""Bytes of x [b, s, h] for four samples in fp32."""
VECTORS = 1024
"""More bytes than a layer's norms, their gradients and the norms of those have."""


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_dtensor_sends_megatrons_four_all_reduces_a_layer(two: RankPool, engine: str) -> None:
    """Two in forward, two in backward, of the whole of x each (1909.08053 sec. 3), and nothing else of that size."""
    rows = per_layer(two, Layout(tp=2, micro_batch=4), engine)
    assert {key for key, (_, payload) in rows.items() if payload} == {("tp", "all_reduce")}
    calls, payload = rows["tp", "all_reduce"]
    assert calls == 4
    assert 4 * BOUNDARY <= payload < 4 * BOUNDARY + VECTORS


def test_checkpoint_stops_before_the_last_all_reduce(two: RankPool) -> None:
    """A layer that is computed again ends with the last tensor that backward asks for: one sum less than ours."""
    layout = Layout(tp=2, micro_batch=4, recompute=True)
    calls = [per_layer(two, layout, engine)["tp", "all_reduce"][0] for engine in ("torch", "native")]
    assert calls == [5, 6]


def test_with_sequence_parallelism_they_become_gathers_and_scatters(two: RankPool) -> None:
    """Beside them there are the norms' gradients to be summed: two weights and two biases a layer."""
    rows = per_layer(two, Layout(tp=2, sp=True, micro_batch=4), "torch")
    assert rows["tp", "all_gather"] == rows["tp", "reduce_scatter"] == (4, 4 * BOUNDARY)
    calls, payload = rows["tp", "all_reduce"]
    assert calls == 4
    assert payload < VECTORS


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_send_each_boundary_tensor_once(two: RankPool, schedule: str) -> None:
    """Each of four micro-batches forth and back, and the tied embedding's gradient, as ours do."""
    layout = Layout(pp=2, schedule=schedule, micro_batch=1, global_batch=4)
    for engine in ("torch", "native"):
        for rows in two.run(seen, layout, engine, 2):
            assert rows["pp", "send"] == (4, BOUNDARY)
            _, payload = rows["pp", "all_reduce"]
            assert payload == TINY.vocab * TINY.hidden * 4 + 8  # and norm and loss
