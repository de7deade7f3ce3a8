"""The same step runs on `meta` tensors: nothing in it needs data, and it counts what a real run counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.config.models import load_model
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.model.counts import total_parameters
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from tests.parallel.test_communication import traffic
from tests.pool import RankPool
from tests.training import tiny


def step_on_meta(experiment: Experiment) -> dict[str, Any]:
    """One step of rank 0 in shape only, with its traffic."""
    layout = experiment.layout
    mesh = meshes.shape_only_mesh(layout)
    device = torch.device("meta")
    engine = NativeEngine(experiment, mesh, device)
    tokens = torch.zeros(layout.micro_batch, experiment.seq, dtype=torch.int64, device=device)
    for step in range(2):
        mesh.ledger.reset()
        batches = [MicroBatch(tokens, tokens, BatchPosition(step, 0)) for _ in range(layout.accumulation)]
        engine.step(batches, lambda phase: None)
        engine.synchronize()
    return {
        "rows": {(r["op"], r["group"], r["purpose"]): r for r in mesh.ledger.rows()},
        "psi": engine.local_parameters() + engine.padding(),
        "parameters": engine.local_parameters(),
    }


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(dp=2, zero=z) for z in range(4)),
        Layout(dp=2, zero=1, zero1_reduce="all-reduce", precision="bf16"),
        Layout(dp=2, zero=2, precision="fp16", micro_batch=1, global_batch=4, recompute=True),
        Layout(tp=2, sp=True, micro_batch=2, recompute=True),
        Layout(tp=2, micro_batch=2),
    ],
    ids=str,
)
def test_shape_only_counts_what_gloo_sends(two: RankPool, layout: Layout) -> None:
    experiment = tiny(layout, dropout=0.1)
    assert step_on_meta(experiment)["rows"] == two.run(traffic, experiment)[0]["rows"]


def test_a_published_model_at_its_published_layout() -> None:
    """100B on 400 GPUs, MP 16 (1910.02054 Table 5) passes through the step as shapes, and is 100B."""
    model = load_model("zero-100b")
    layout = Layout(dp=25, tp=16, zero=2, micro_batch=1, precision="fp16", recompute=True)
    seen = step_on_meta(Experiment(name="100b", model=model, layout=layout))
    # Each rank holds a sixteenth of the matrices and all of the norms and row-parallel biases.
    duplicates = 6 * model.hidden * model.layers + (2 + model.seq) * model.hidden
    assert seen["parameters"] == (total_parameters(model) - duplicates) // 16 + duplicates
