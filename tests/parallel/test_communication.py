"""Tests that traffic equals the papers' volumes to the byte, and that communication overlaps with computation."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from tests.pool import RankPool
from tests.training import TINY, micro_batches, tiny

NORM_BYTES = 8


def traffic(experiment: Experiment) -> dict[str, Any]:
    """Return the ledger rows of a step on this rank by (operation, group, purpose), and the parameters with padding."""
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    engine.step(micro_batches(experiment, mesh.dp.rank, 0), lambda phase: None)
    engine.synchronize()
    mesh.ledger.reset()
    engine.step(micro_batches(experiment, mesh.dp.rank, 1), lambda phase: None)
    engine.synchronize()
    rows = {(r["op"], r["group"], r["purpose"]): r for r in mesh.ledger.rows()}
    return {"rows": rows, "psi": engine.local_parameters() + engine.padding()}


def sent_bytes(found: dict[str, Any], group: str) -> int:
    """Return the bytes that this rank sent in a group's ring."""
    return sum(row["sent_bytes"] for key, row in found["rows"].items() if key[1] == group)


@pytest.mark.parametrize(
    ("zero", "feb2020", "passes"),
    [(0, False, 2), (1, False, 2), (1, True, 3), (2, False, 2), (3, False, 3)],
    ids=["dp", "zero1", "zero1-feb2020", "zero2", "zero3"],
)
@pytest.mark.parametrize(("pool", "precision"), [("two", "fp32"), ("four", "bf16")])
def test_dp_traffic_equals_the_volumes_of_the_zero_paper(
    request: pytest.FixtureRequest, pool: str, zero: int, feb2020: bool, passes: int, precision: str
) -> None:
    """2 Psi of stages 0 to 2, and 3 Psi of stage 3 (1910.02054 sec. 7) and of stage 1 in February 2020."""
    ranks: RankPool = request.getfixturevalue(pool)
    n = ranks.world
    layout = Layout(
        dp=n,
        zero=zero,
        zero1_reduce="all-reduce" if feb2020 else "reduce-scatter",
        precision=precision,
        bucket_bytes=20_000,
    )
    size = 4 if precision == "fp32" else 2
    for found in ranks.run(traffic, tiny(layout)):
        assert sent_bytes(found, "dp") == passes * found["psi"] * size * (n - 1) // n
        assert sent_bytes(found, "world") == 2 * NORM_BYTES * (n - 1) // n


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fp32_gradients_send_4_bytes_and_parameters_send_2(two: RankPool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, precision="bf16", grad_dtype="fp32", bucket_bytes=20_000)
    reductions, gathers = {0: (2, 0), 1: (1, 1), 2: (1, 1), 3: (1, 2)}[zero]
    for seen in two.run(traffic, tiny(layout)):
        assert sent_bytes(seen, "dp") == (4 * reductions + 2 * gathers) * seen["psi"] // 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_accumulation_multiplies_the_passes_of_stages_2_and_3(two: RankPool, zero: int) -> None:
    """Stages 0 and 1 reduce once per step. Stage 2 reduces every micro-batch, and stage 3 also gathers for it."""
    k = 3
    layout = Layout(dp=2, zero=zero, micro_batch=1, global_batch=2 * k)
    passes = {0: 2, 1: 2, 2: k + 1, 3: 3 * k}[zero]
    for seen in two.run(traffic, tiny(layout)):
        assert sent_bytes(seen, "dp") == passes * seen["psi"] * 4 // 2


@pytest.mark.parametrize(("recompute", "per_layer"), [(False, 4), (True, 6)], ids=["", "recompute"])
def test_tp_sends_four_all_reduces_per_layer(two: RankPool, recompute: bool, per_layer: int) -> None:
    """Two all-reduces of b s h forward and two backward per layer (1909.08053 sec. 3); recomputation repeats
    the forward ones (1910.02054 sec. 8)."""
    b = 4
    layout = Layout(tp=2, micro_batch=b, recompute=recompute)
    for seen in two.run(traffic, tiny(layout)):
        block = seen["rows"]["all_reduce", "tp", "block"]
        assert block["calls"] == per_layer * TINY.layers
        assert block["payload_bytes"] == per_layer * TINY.layers * b * TINY.seq * TINY.hidden * 4
        outside = {key[2]: row["calls"] for key, row in seen["rows"].items() if key[1] == "tp"}
        assert outside == {"block": per_layer * TINY.layers, "embedding": 1, "head": 1, "cross-entropy": 2}


def test_sequence_parallelism_replaces_each_all_reduce_of_tp(two: RankPool) -> None:
    """A reduce-scatter and an all-gather replace each all-reduce. As in Megatron-LM, the weight gradients of the two
    column-parallel products gather the inputs again."""
    b = 4
    for seen in two.run(traffic, tiny(Layout(tp=2, sp=True, micro_batch=b))):
        rows = seen["rows"]
        message = b * TINY.seq * TINY.hidden * 4
        assert rows["reduce_scatter", "tp", "block"]["payload_bytes"] == 4 * TINY.layers * message
        assert rows["all_gather", "tp", "block"]["payload_bytes"] == (4 + 2) * TINY.layers * message


def events(experiment: Experiment) -> list[tuple[str, str]]:
    """Return the issued collectives and the passes of blocks in one step, in order."""
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    engine.step(micro_batches(experiment, mesh.dp.rank, 0), lambda phase: None)
    engine.synchronize()
    found: list[tuple[str, str]] = []
    mesh.ledger.observers.append(lambda sequence, op, group, purpose: found.append((op, purpose)))
    for i, block in enumerate(engine.parts[0].model.blocks.values()):
        block.register_forward_pre_hook(lambda m, a, i=i: found.append(("forward starts", str(i))))
        block.register_forward_hook(lambda m, a, o, i=i: found.append(("forward ends", str(i))))
        last, first = block.mlp.down_bias, block.attention.norm
        last.register_post_accumulate_grad_hook(lambda p, i=i: found.append(("backward runs", str(i))))
        first.register_post_accumulate_grad_hook(lambda p, i=i: found.append(("backward ends", str(i))))
    engine.step(micro_batches(experiment, mesh.dp.rank, 1), lambda phase: found.append(("phase", phase)))
    engine.synchronize()
    return found


@pytest.mark.parametrize("zero", range(4))
def test_reductions_start_before_backward_ends(two: RankPool, zero: int) -> None:
    """All buckets except those of the first layers are in reduction when the first block's backward ends."""
    layout = Layout(dp=2, zero=zero, bucket_bytes=40_000)
    for seen in two.run(events, tiny(layout)):
        end = seen.index(("backward ends", "0"))
        reductions = [i for i, (_, purpose) in enumerate(seen) if purpose == "gradients"]
        early = [i for i in reductions if i < end]
        assert len(reductions) >= 4
        assert len(early) >= len(reductions) - 2
        # The first reduction starts before half of the blocks have run backward.
        assert early[0] < seen.index(("backward runs", str(TINY.layers // 2 - 1)))


def test_stage_3_gathers_one_block_ahead(two: RankPool) -> None:
    """The gather of block i+1 precedes the forward of block i; that of block i-1 precedes the backward of block i."""
    for seen in two.run(events, tiny(Layout(dp=2, zero=3))):
        gathers: dict[str, int] = defaultdict(int)
        order: list[tuple[int, str]] = []
        for op, purpose in seen:
            gathers["count"] += purpose == "parameters"
            if op in ("forward starts", "backward runs"):
                order.append((gathers["count"], f"{op} {purpose}"))
        last = TINY.layers - 1
        issued = {name: count for count, name in order}
        # Forward: when block i starts, the gathers of the embeddings and of blocks 0..i+1 have been issued.
        for i in range(last):
            assert issued[f"forward starts {i}"] == 1 + (i + 2)
        # Backward: the unit of the head remains gathered; when block i starts, blocks last..i-1 are gathered again.
        forward = issued[f"forward starts {last}"]
        assert forward == 1 + last + 1 + 1, "the last block issues the gather of the head's unit"
        for i in range(last, 0, -1):
            assert issued[f"backward runs {i}"] == forward + (last - i) + 2
        assert issued["backward runs 0"] == forward + last + 1


def test_stage_1_gathers_parameters_during_the_next_forward(two: RankPool) -> None:
    """The next forward pass starts before the gathers of the updated parameters end."""
    for pending in two.run(_pending_gathers, tiny(Layout(dp=2, zero=1, bucket_bytes=20_000))):
        assert pending["at step end"] > 3
        assert 0 < pending["when block 0 runs"] < pending["at step end"]
        assert pending["after forward"] == 0


def _pending_gathers(experiment: Experiment) -> dict[str, int]:
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    param_gather = engine.parts[0].sharded.param_gather
    assert param_gather is not None
    engine.step(micro_batches(experiment, mesh.dp.rank, 0), lambda phase: None)
    pending = {"at step end": len(param_gather._works)}

    def count(*_: object) -> None:
        pending["when block 0 runs"] = len(param_gather._works)

    engine.parts[0].model.blocks["0"].register_forward_hook(count)
    batch = micro_batches(experiment, mesh.dp.rank, 1)[0]
    engine.parts[0].sharded.begin(0, 1)
    engine.parts[0].model(batch.tokens, batch.targets, batch.place)
    pending["after forward"] = len(param_gather._works)
    return pending
