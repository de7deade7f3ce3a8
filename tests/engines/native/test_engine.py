"""Tests of engine native: captured micro-batches and their record and prediction, and memory that runs free.

The capture itself needs a GPU (`tests/gpu/test_step.py`).
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from repro.config import Experiment, Layout, Training
from repro.config.engines import capture_obstacle
from repro.config.systems import load_system_file
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from repro.simulate.step import simulate
from tests.engines.runs import result_of
from tests.training import TINY, tiny

GRAPHS = Layout(micro_batch=2, global_batch=4, cuda_graphs=True)


@pytest.mark.parametrize(
    ("change", "training", "obstacle"),
    [
        ({}, {}, ""),
        ({"recompute": True}, {}, ""),
        ({}, {"dropout": 0.1}, ""),
        ({"kernels": "reference"}, {}, ""),
        ({"kernels": "reference"}, {"dropout": 0.1}, "from the host"),
        ({"dp": 2}, {}, "collectives between ranks"),
        ({"recompute": True, "pa_cpu": True}, {}, "host memory"),
    ],
)
def test_unsupported_settings_prevent_a_capture(
    change: dict[str, object], training: dict[str, float], obstacle: str
) -> None:
    found = capture_obstacle(replace(GRAPHS, **change), Training(**training))  # type: ignore[arg-type]
    assert obstacle in found
    assert bool(obstacle) == bool(found)


def test_record_states_why_passes_are_not_captured() -> None:
    device = torch.device("cpu")
    engine = NativeEngine(tiny(GRAPHS), meshes.single_rank_mesh(), device)
    assert engine.captured is None
    assert engine.report().configuration == {"cuda_graphs": "the device is cpu, and CUDA graphs need a GPU"}
    eager = NativeEngine(tiny(replace(GRAPHS, cuda_graphs=False)), meshes.single_rank_mesh(), device)
    assert eager.report().configuration == {}


def test_predicted_time_of_captured_step_excludes_the_host() -> None:
    def seconds(layout: Layout) -> float:
        experiment = Experiment(name="a", model=TINY, layout=layout, system="dgx-h200")
        found = simulate(experiment, load_system_file("dgx-h200"), time=True)
        assert found.time is not None
        return found.time.step_s

    layout = replace(GRAPHS, precision="bf16")
    captured, eager = seconds(layout), seconds(replace(layout, cuda_graphs=False))
    assert captured < eager / 3
    # A prevented capture does not change the predicted time.
    prevented = replace(layout, recompute=True, pa_cpu=True)
    assert seconds(prevented) == seconds(replace(prevented, cuda_graphs=False))


LAYOUTS = {f"ZeRO {zero}": Layout(global_batch=2, zero=zero, precision="bf16") for zero in range(4)}
LAYOUTS["recomputed"] = Layout(micro_batch=2, zero=2, recompute=True, md=True)


def count_tensors() -> int:
    gc.collect()
    return sum(type(each) in (torch.Tensor, torch.nn.Parameter) for each in gc.get_objects())


@pytest.mark.parametrize("name", LAYOUTS)
def test_ended_experiment_frees_all_tensors(name: str) -> None:
    """The next experiment can use their memory."""
    before = count_tensors()
    result_of(tiny(LAYOUTS[name], steps=3, untimed_steps=1))
    assert count_tensors() <= before
