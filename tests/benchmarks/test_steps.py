"""Benchmark of steps of the native engine and of torch's strategies, with the same model and samples on two gloo ranks.

    make benchmarks

The model is in fp32 with 6 layers of width 256, and each rank has 128 tokens x 4. Each strategy is one row.
`repro run suites/smoke.toml --only 'speed-*'` records the same comparisons as ratios with intervals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout, Training
from repro.config.models import load_model
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import RankPool

RUNS: dict[str, ExperimentRun] = {}
"""Runs with their engines, by name; retained in a rank between calls."""


def take_steps(engine: str, zero: int, steps: int) -> float:
    """Return the mean seconds of `steps` steps on this rank; the first call builds the engine."""
    name = f"{engine}-{zero}"
    if name not in RUNS:
        layout = Layout(dp=2, zero=zero, micro_batch=4)
        training = Training(steps=10_000, untimed_steps=2)
        experiment = Experiment(
            name=name, model=load_model("smoke-speed"), layout=layout, training=training, engine=engine
        )
        mesh = meshes.distributed_mesh(layout, "cpu")
        RUNS[name] = ExperimentRun(experiment, mesh, torch.device("cpu"), lambda step, phase: None)
        RUNS[name].prelude()
    RUNS[name].steps(steps)
    return sum(RUNS[name].rounds[-1]) / steps


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("engine", ["native", pytest.param("torch", marks=needs("torch"))])
def test_step_of_engine_and_stage(benchmark: Any, two: RankPool, engine: str, zero: int) -> None:
    two.run(take_steps, engine, zero, 1)
    benchmark.group = f"step, stage {zero}, two ranks"
    benchmark.pedantic(two.run, args=(take_steps, engine, zero, 2), rounds=8, iterations=1)
