"""Tasks that SLURM shows one GPU alone are told what that costs, and others are not."""

from __future__ import annotations

import pytest

from repro.doctor.binding import of_options, of_task


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "gpus-per-task = 1"),
        ({"SLURM_GPUS_PER_TASK": "v100:1", "SLURM_GPUS_ON_NODE": "1"}, "gpus-per-task = v100:1"),
        ({"SLURM_GPU_BIND": "single:1"}, "gpu-bind = single:1"),
        ({"SLURM_NTASKS_PER_GPU": "1"}, "ntasks-per-gpu = 1"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "1 of the job's 8 GPUs on this node is visible"),
    ],
)
def test_a_task_that_sees_one_gpu_of_several(environment: dict[str, str], found: str) -> None:
    (check,) = of_task(environment, visible=1)
    assert (check.state, check.fatal) == ("limited", False)
    assert check.found.startswith(found)
    assert "gpu-bind=none" in check.enables
    assert of_task(environment, visible=8) == []


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_GPUS_ON_NODE": "1"}, {"SLURM_GPU_BIND": "none"}, {"SLURM_GPU_BIND": "verbose,none"}],
)
def test_the_only_gpu_of_a_machine_or_job(environment: dict[str, str]) -> None:
    assert of_task(environment, visible=1) == []


def test_what_a_profile_asks_for() -> None:
    assert of_options({"reservation": "bench", "gpu-bind": "none"}) == []
    (check,) = of_options({"reservation": "bench", "gpu-bind": "map_gpu:0,1"})
    assert check.found == "gpu-bind = map_gpu:0,1: a task sees only its own GPU"
