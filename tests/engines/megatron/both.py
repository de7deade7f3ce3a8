"""One experiment by megatron-core and by this suite's own engine, on the same ranks; runs inside rank pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from repro.config import Experiment, Layout
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.training import Trained, micro_batches, smallest, tiny

needs_megatron = needs("megatron")


def build(experiment: Experiment) -> Any:
    """Its engine on this rank."""
    return build_engine(experiment, meshes.distributed_mesh(experiment.layout, "cpu"), torch.device("cpu"))


def take(engine: Any, experiment: Experiment, trained: Trained, step: int) -> None:
    """One step."""
    scale = engine.loss_scale()
    if scale is not None:
        trained.scale.append(scale.item())
    norms = engine.step(micro_batches(experiment, engine.mesh.dp.rank, step), lambda phase: None)
    if norms.overflow.item():
        trained.skipped.append(step)
    trained.loss.append(norms.loss.item())
    trained.norm.append(norms.gradient.item())


def finish(engine: Any, trained: Trained) -> Trained:
    """With the rank's share of the parameters, under this suite's names, and what it says of its stage."""
    engine.synchronize()
    trained.parameters, trained.pipeline = engine.full_parameters(), engine.pipeline_report()
    return trained


def train(experiment: Experiment) -> Trained:
    """All steps."""
    engine, trained = build(experiment), Trained([], [], {})
    for step in range(experiment.training.steps):
        take(engine, experiment, trained, step)
    return finish(engine, trained)


def train_both(layout: Layout, **training: Any) -> tuple[Trained, Trained]:
    """By megatron-core and by this suite."""
    megatron = tiny(layout, smallest(layout), "megatron", **training)
    return train(megatron), train(replace(megatron, engine="native"))
