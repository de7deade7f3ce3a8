"""Tests that traffic equals the papers' volumes to the byte, and that communication overlaps with computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from repro import cli
from repro.config import Experiment, Layout
from repro.config.suites import write_template
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from repro.parallel.mesh import Mesh
from tests.parallel.test_parity import name_of
from tests.pool import RankPool, pool_of
from tests.training import TINY, micro_batches, tiny

NORM_BYTES = 8


def warmed_up(experiment: Experiment) -> tuple[Mesh, NativeEngine]:
    """Return this rank's mesh and engine after a step, since the first step differs from all later ones."""
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    engine.step(micro_batches(experiment, mesh.dp.rank, 0), lambda phase: None)
    return mesh, engine


def traffic(experiment: Experiment) -> dict[str, Any]:
    """Return the ledger rows of a step on this rank by (operation, group, purpose), and the parameters with padding."""
    mesh, engine = warmed_up(experiment)
    engine.synchronize()
    mesh.ledger.reset()
    engine.step(micro_batches(experiment, mesh.dp.rank, 1), lambda phase: None)
    engine.synchronize()
    rows = {(r["op"], r["group"], r["purpose"]): r for r in mesh.ledger.rows()}
    return {"rows": rows, "psi": engine.local_parameters() + engine.padding()}


DP2 = Layout(dp=2, bucket_bytes=20_000)
DP4 = Layout(dp=4, bucket_bytes=20_000, precision="bf16")
FP32_GRADIENTS = replace(DP2, precision="bf16", grad_dtype="fp32")
ACCUMULATED = replace(DP2, global_batch=6)


@pytest.mark.parametrize(
    ("layout", "reduced", "gathered"),
    [
        # 2 Psi of stages 0 to 2, and 3 Psi of stage 3 (1910.02054 sec. 7) and of stage 1 in February 2020.
        (DP2, 2, 0),
        (replace(DP4, zero=1), 1, 1),
        (replace(DP4, zero=1, zero1_reduce="all-reduce"), 2, 1),
        (replace(DP4, zero=2), 1, 1),
        (replace(DP4, zero=3), 1, 2),
        *(
            (replace(FP32_GRADIENTS, zero=zero), *passes)
            for zero, passes in enumerate([(2, 0), (1, 1), (1, 1), (1, 2)])
        ),
        # With three micro-batches, stages 0 and 1 reduce once per step. Stage 2 reduces every micro-batch, and stage 3
        # also gathers for it.
        *(
            (replace(ACCUMULATED, zero=zero), *passes)
            for zero, passes in enumerate([(2, 0), (1, 1), (3, 1), (3, 6)])
        ),
    ],
    ids=name_of,
)
def test_dp_traffic_equals_the_volumes_of_the_zero_paper(
    request: pytest.FixtureRequest, layout: Layout, reduced: int, gathered: int
) -> None:
    """A reduction sends `reduced` times Psi gradients, and gathers send `gathered` times Psi parameters."""
    n = layout.dp
    size = 4 if layout.precision == "fp32" else 2
    psi_bytes = reduced * (4 if layout.grad_dtype == "fp32" else size) + gathered * size
    for found in pool_of(request, layout).run(traffic, tiny(layout)):
        sent = dict.fromkeys(("dp", "world"), 0)
        for (_, group, _), row in found["rows"].items():
            sent[group] += row["sent_bytes"]
        assert sent == {"dp": psi_bytes * found["psi"] * (n - 1) // n, "world": 2 * NORM_BYTES * (n - 1) // n}


@pytest.mark.parametrize(
    ("settings", "per_layer"),
    [
        ({}, {"all_reduce": 4}),
        ({"recompute": True}, {"all_reduce": 6}),
        ({"sp": True}, {"reduce_scatter": 4, "all_gather": 4 + 2}),
    ],
)
def test_tp_traffic_equals_the_volumes_of_the_papers(
    two: RankPool, settings: dict[str, bool], per_layer: dict[str, int]
) -> None:
    """Two all-reduces of b s h forward and two backward per layer (1909.08053 sec. 3); recomputation repeats
    the forward ones (1910.02054 sec. 8). With sequence parallelism, a reduce-scatter and an all-gather replace each.
    As in Megatron-LM, the weight gradients of the two column-parallel products gather the inputs again."""
    message = 4 * TINY.seq * TINY.hidden * 4
    for seen in two.run(traffic, tiny(Layout(tp=2, micro_batch=4, **settings))):
        rows = {
            op: row
            for (op, group, purpose), row in seen["rows"].items()
            if (group, purpose) == ("tp", "block")
        }
        calls = {op: n * TINY.layers for op, n in per_layer.items()}
        assert {op: row["calls"] for op, row in rows.items()} == calls
        assert all(rows[op]["payload_bytes"] == n * message for op, n in calls.items())
        if "sp" not in settings:
            others = {key[2]: row["calls"] for key, row in seen["rows"].items() if key[1] == "tp"}
            assert others == {"block": calls["all_reduce"], "embedding": 1, "head": 1, "cross-entropy": 2}


def events(experiment: Experiment) -> list[tuple[str, str]]:
    """Return the issued collectives and the passes of blocks in one step, in order."""
    mesh, engine = warmed_up(experiment)
    engine.synchronize()
    found: list[tuple[str, str]] = []
    mesh.ledger.observers.append(lambda sequence, op, group, purpose: found.append((op, purpose)))
    for i, block in enumerate(engine.parts[0].model.blocks.values()):
        block.register_forward_pre_hook(lambda m, a, i=i: found.append(("forward starts", str(i))))
        block.register_forward_hook(lambda m, a, o, i=i: found.append(("forward ends", str(i))))
        last = block.mlp.down_bias
        last.register_post_accumulate_grad_hook(lambda p, i=i: found.append(("backward runs", str(i))))
    engine.step(micro_batches(experiment, mesh.dp.rank, 1), lambda phase: found.append(("phase", phase)))
    engine.synchronize()
    return found


def test_stage_3_gathers_one_block_ahead(two: RankPool) -> None:
    """The gather of block i+1 precedes the forward of block i; that of block i-1 precedes the backward of block i."""
    last = TINY.layers - 1
    for seen in two.run(events, tiny(Layout(dp=2, zero=3))):
        gathers, issued = 0, dict[tuple[str, int], int]()
        for op, purpose in seen:
            gathers += purpose == "parameters"
            if op in ("forward starts", "backward runs"):
                issued[op, int(purpose)] = gathers
        # Forward: when block i starts, the gathers of the embeddings and of blocks 0..i+1 have been issued.
        for i in range(last):
            assert issued["forward starts", i] == 1 + (i + 2)
        # Backward: the unit of the head remains gathered; when block i starts, blocks last..i-1 are gathered again.
        forward = issued["forward starts", last]
        assert forward == 1 + last + 1 + 1, "the last block issues the gather of the head's unit"
        for i in range(last, 0, -1):
            assert issued["backward runs", i] == forward + (last - i) + 2
        assert issued["backward runs", 0] == forward + last + 1


@pytest.mark.parametrize(("micro_batch", "has_note"), [(8, False), (4, True)])
def test_results_explain_the_traffic_of_stage_2_with_accumulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], micro_batch: int, has_note: bool
) -> None:
    write_template(suite := tmp_path / "s.toml")
    text = suite.read_text().replace("micro_batch = 8 ", f"micro_batch = {micro_batch} ")
    suite.write_text(text.replace("layers = 4", "layers = 1"))
    store = str(tmp_path / "store")
    assert cli.main(["run", str(suite), "--evidence", "simulated", "--results", store]) == 0
    capsys.readouterr()
    assert cli.main(["results", "--results", store, "s", "--details"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert ("with m micro-batches ZeRO 2 sends (m + 1)/2 times" in output) is has_note
