"""Tests that a step of a published model runs on `meta` tensors, without data."""

from __future__ import annotations

import torch

from repro.config import Experiment, Layout
from repro.config.models import load_model
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.model.counts import total_parameters
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes


def parameters_of_a_step_on_meta(experiment: Experiment) -> int:
    """Run one step of rank 0 on `meta` tensors, and return the rank's number of parameters."""
    layout, device = experiment.layout, torch.device("meta")
    engine = NativeEngine(experiment, meshes.shape_only_mesh(layout), device)
    tokens = torch.zeros(layout.micro_batch, experiment.seq, dtype=torch.int64, device=device)
    engine.step([MicroBatch(tokens, tokens, BatchPosition(0, 0))] * layout.accumulation, lambda phase: None)
    engine.synchronize()
    return engine.local_parameters()


def test_published_100b_model_has_100b_parameters() -> None:
    """The layout is that of 1910.02054 Table 5: 400 GPUs with MP 16."""
    model = load_model("zero-100b")
    layout = Layout(dp=25, tp=16, zero=2, micro_batch=1, precision="fp16", recompute=True)
    found = parameters_of_a_step_on_meta(Experiment(name="100b", model=model, layout=layout))
    # Each rank has 1/16 of the matrices, and all norms, row-parallel biases and positions.
    duplicates = 6 * model.hidden * model.layers + (2 + model.seq) * model.hidden
    assert found == (total_parameters(model) - duplicates) // 16 + duplicates
