"""Test that an ended experiment frees its tensors, so that the next experiment can use their memory."""

from __future__ import annotations

import gc

import pytest
import torch

from repro.config import Layout
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.training import tiny

LAYOUTS = {
    **{
        f"ZeRO {zero}": Layout(micro_batch=2, global_batch=4, zero=zero, precision="bf16")
        for zero in range(4)
    },
    "recomputed": Layout(micro_batch=2, zero=2, recompute=True, md=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ended_experiment_frees_all_tensors(name: str) -> None:
    def run() -> None:
        experiment = ExperimentRun(
            tiny(LAYOUTS[name], steps=3, untimed_steps=1),
            meshes.single_rank_mesh(),
            torch.device("cpu"),
            lambda step, phase: None,
        )
        experiment.prelude()
        experiment.steps(2)
        experiment.result()

    def tensors() -> int:
        gc.collect()
        return sum(type(each) in (torch.Tensor, torch.nn.Parameter) for each in gc.get_objects())

    before = tensors()
    run()
    assert tensors() <= before
