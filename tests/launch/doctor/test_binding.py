"""Tasks that SLURM shows one GPU alone are told what that costs, and others are not."""

from __future__ import annotations

import pytest

from repro.launch.doctor.binding import of_options, of_task


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "gpus-per-task = 1"),
        ({"SLURM_GPUS_PER_TASK": "v100:1", "SLURM_GPUS_ON_NODE": "1"}, "gpus-per-task = v100:1"),
        ({"SLURM_GPU_BIND": "single:1"}, "gpu-bind = single:1"),
        ({"SLURM_NTASKS_PER_GPU": "1"}, "ntasks-per-gpu = 1"),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "gpus-per-task = 1"),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "1,2"}, "gpus-per-task = 1"),
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
    [
        {},
        {"SLURM_GPUS_ON_NODE": "1"},
        {"SLURM_GPU_BIND": "none"},
        {"SLURM_GPU_BIND": "verbose,none"},
        {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        {"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "1(x4)"},
    ],
)
def test_the_only_gpu_of_a_machine_or_job(environment: dict[str, str]) -> None:
    assert of_task(environment, visible=1) == []


def test_what_a_profile_asks_for() -> None:
    assert of_options({"reservation": "bench", "gpu-bind": "none"}, 8) == []
    (check,) = of_options({"reservation": "bench", "gpu-bind": "map_gpu:0,1"}, 8)
    assert check.found == "gpu-bind = map_gpu:0,1: a task may see only some of its node's GPUs"


@pytest.mark.parametrize("gpus", [0, 1])
def test_nothing_is_lost_of_a_node_with_one_gpu(gpus: int) -> None:
    assert of_options({"gpus-per-task": "1"}, gpus) == []
