"""Our step beside torch's own strategies: the same model and samples, two gloo ranks, taking turns.

    make benchmarks

fp32, 6 layers of 256, 128 tokens x 4 per rank.  The suite records the same as ratios with intervals
(`repro run suites/smoke.toml --only 'speed-*'`); here each strategy is one row of pytest-benchmark.
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
"""Lives in the ranks: engines that were built stay for the following calls."""


def take_steps(engine: str, zero: int, steps: int) -> float:
    """Mean seconds of `steps` steps on this rank; builds the engine on the first call."""
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
def test_step(benchmark: Any, two: RankPool, engine: str, zero: int) -> None:
    two.run(take_steps, engine, zero, 1)
    benchmark.group = f"step, stage {zero}, two ranks"
    benchmark.pedantic(two.run, args=(take_steps, engine, zero, 2), rounds=8, iterations=1)
