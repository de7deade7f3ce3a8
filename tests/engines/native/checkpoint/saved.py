"""Runs with checkpoints, in this process or on the ranks of a pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from repro.config import Experiment, Layout, Model
from repro.engines.native.checkpoint import index
from repro.launch.rank.checkpoints import CheckpointPlace
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.training import TINY, tiny

MODEL = replace(TINY, name="tiny-2", layers=2)
HALF, STEPS = 3, 6
LAYOUTS = {
    "dp1": Layout(micro_batch=2, global_batch=4),
    "dp2-z0": Layout(dp=2, micro_batch=1, global_batch=4),
    "dp2-z1": Layout(dp=2, zero=1, micro_batch=2, global_batch=4),
    "dp2-z2": Layout(dp=2, zero=2, micro_batch=1, global_batch=4, bucket_bytes=20_000),
    "dp2-z3": Layout(dp=2, zero=3, micro_batch=2, global_batch=4),
    "tp2": Layout(tp=2, micro_batch=4, global_batch=4),
    "pp2": Layout(pp=2, micro_batch=1, global_batch=4),
    "tp2-dp2-z1": Layout(tp=2, dp=2, zero=1, micro_batch=2, global_batch=4),
    "tp2-dp2-z3": Layout(tp=2, dp=2, zero=3, sp=True, micro_batch=2, global_batch=4),
    "pp2-dp2-z2": Layout(pp=2, dp=2, zero=2, micro_batch=1, global_batch=4),
    "cp2": Layout(cp=2, micro_batch=2, global_batch=4),
    "cp2-dp2-z3": Layout(cp=2, dp=2, zero=3, micro_batch=1, global_batch=4),
    "tp2-pp2": Layout(tp=2, pp=2, micro_batch=2, global_batch=4, recompute=True),
}


def experiment(
    layout: Layout, steps: int = STEPS, every: int = HALF, model: Model = MODEL, **training: Any
) -> Experiment:
    settings = {"untimed_steps": 1, "dropout": 0.1, "checkpoint_every": every, **training}
    return tiny(layout, model, steps=steps, **settings)


def start(experiment: Experiment, root: Path, device: str = "cpu") -> ExperimentRun:
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, device) if layout.world > 1 else meshes.single_rank_mesh()
    place = CheckpointPlace(root, root / "stop") if experiment.training.checkpoint_every else None
    return ExperimentRun(experiment, mesh, torch.device(device), lambda step, phase: None, place)


def train(experiment: Experiment, root: Path, until: int = STEPS, device: str = "cpu") -> dict[str, Any]:
    """Resume a run from the checkpoints in `root`, stop it after step `until`, and return its result."""
    torch.set_num_threads(1)
    run = start(experiment, root, device)
    run.prelude()
    run.steps(until - run.index)
    return run.result().as_dict()


def checkpoint(root: Path, experiment: Experiment, step: int = HALF) -> Path:
    return index.folder_of(root / experiment.key, step)
