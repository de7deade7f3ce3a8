"""Training of one experiment in megatron-core and in engine native on the same ranks; runs inside rank pools."""

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
    """Return the engine of an experiment on this rank."""
    return build_engine(experiment, meshes.distributed_mesh(experiment.layout, "cpu"), torch.device("cpu"))


def train_step(engine: Any, experiment: Experiment, trained: Trained, step: int) -> None:
    """Train one step and record its results."""
    scale = engine.loss_scale()
    if scale is not None:
        trained.scale.append(scale.item())
    norms = engine.step(micro_batches(experiment, engine.mesh.dp.rank, step), lambda phase: None)
    if norms.overflow.item():
        trained.skipped.append(step)
    trained.loss.append(norms.loss.item())
    trained.norm.append(norms.gradient.item())


def collect(engine: Any, trained: Trained) -> Trained:
    """Add this rank's parameters, under the names of engine native, and its pipeline report to the results."""
    engine.synchronize()
    trained.parameters, trained.pipeline = engine.full_parameters(), engine.pipeline_report()
    return trained


def train(experiment: Experiment) -> Trained:
    """Train all steps of an experiment and return the results."""
    engine, trained = build(experiment), Trained([], [], {})
    for step in range(experiment.training.steps):
        train_step(engine, experiment, trained, step)
    return collect(engine, trained)


def train_both(layout: Layout, training: dict[str, Any]) -> tuple[Trained, Trained]:
    """Return the results of megatron-core and of engine native."""
    megatron = tiny(layout, smallest(layout), "megatron", **training)
    return train(megatron), train(replace(megatron, engine="native"))
