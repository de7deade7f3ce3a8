"""Provide complete runs of an experiment, and the pool of ranks of a layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from repro.config import Experiment, Layout
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.pool import RankPool


def result_of(experiment: Experiment) -> dict[str, Any]:
    """Run an experiment to its end on this rank, or in a process without ranks, and return its result."""
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, "cpu") if dist.is_initialized() else meshes.single_rank_mesh()
    run = ExperimentRun(experiment, mesh, torch.device("cpu"), lambda step, phase: None)
    run.prelude()
    run.steps(run.left)
    return run.result().as_dict()


def pool_of(request: pytest.FixtureRequest, layout: Layout) -> RankPool:
    """Return the pool with as many ranks as the layout."""
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four"}[layout.world])
    return pool
