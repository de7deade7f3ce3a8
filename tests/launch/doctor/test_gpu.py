"""Tests of the checks of GPUs and of their torch build by the doctor and by `make test-gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from repro.launch.doctor import machine
from repro.launch.doctor.machine import (
    check_gpus,
    check_profile_binding,
    check_task_binding,
    has_kernels_for,
    supported_precisions,
    unusable_reason,
)


def fake_torch(
    capability: tuple[int, int], architectures: list[str], count: int = 1, *, cuda: str | None = "12.6"
) -> Any:
    """Return a torch module with `count` such devices; without `cuda`, it is a build for CPUs."""
    device = SimpleNamespace(name="GPU", total_memory=2**35, major=capability[0], minor=capability[1])
    api = SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_properties=lambda index: device,
        get_arch_list=lambda: architectures,
        nccl=SimpleNamespace(version=lambda: (2, 27, 3)),
    )
    distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
    return SimpleNamespace(
        cuda=api, version=SimpleNamespace(cuda=cuda), __version__="2.9.0", distributed=distributed
    )


@pytest.fixture(autouse=True)
def remove_slurm_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a SLURM job in which the tests may run."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def test_v100_has_no_bf16_and_needs_kernels_for_sm_70() -> None:
    _, device = check_gpus(fake_torch((7, 0), ["sm_70", "sm_80"]))
    assert (device.state, device.enables) == ("yes", supported_precisions((7, 0)))
    _, device = check_gpus(fake_torch((7, 0), ["sm_80", "sm_90"]))
    assert device.state == "no"
    assert "no kernels for sm_70; torch builds for CUDA 12.6 support this GPU" in device.enables


def test_each_gpu_has_a_check_and_only_one_visible_gpu_a_check_of_binding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names(count: int) -> list[str]:
        return [check.name for check in check_gpus(fake_torch((9, 0), ["sm_90"], count))]

    assert names(1) == ["CUDA", "cuda:0"]
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert names(1) == ["CUDA", "GPU binding", "cuda:0"]
    assert names(4) == ["CUDA", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert machine._nccl(fake_torch((9, 0), ["sm_90"])).found == "2.27.3"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), ["sm_70"], True),
        ((7, 5), ["sm_70"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_90", "sm_120"], True),
        ((9, 0), [], True),
    ],
)
def test_torch_has_kernels_for_gpu(capability: tuple[int, int], architectures: list[str], runs: bool) -> None:
    assert has_kernels_for(capability, architectures) is runs


def test_precisions_by_compute_capability() -> None:
    assert "bf16 by tensor cores" in supported_precisions((8, 0))
    assert "no bf16" in supported_precisions((7, 0))
    assert "without tensor cores" in supported_precisions((6, 1))


@pytest.mark.parametrize(
    ("fake", "in_machine", "reason"),
    [
        (fake_torch((7, 0), ["sm_70"]), ["Tesla V100"], ""),
        (fake_torch((7, 0), [], 0), [], "no NVIDIA GPU or driver found"),
        (fake_torch((7, 0), [], 0, cuda=None), ["V100"], "V100 in the machine, but torch 2.9.0 has no CUDA"),
        (fake_torch((7, 0), [], 0), ["Tesla V100"], "Tesla V100 in the machine, but torch cannot use it"),
        (
            fake_torch((7, 0), ["sm_75", "sm_80"], 2),
            ["Tesla V100"],
            "GPU: this torch has no kernels for sm_70; torch builds for CUDA 12.6 support this GPU; "
            "torch 2.9.0 is built for GPU architectures sm_75, sm_80",
        ),
    ],
    ids=["runs", "no GPU", "no CUDA", "unusable", "too old"],
)
def test_reason_of_an_unusable_gpu_is_one_line(
    fake: Any, in_machine: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [{"name": name, "driver": "1"} for name in in_machine])
    found = unusable_reason(fake)
    assert (found.startswith(reason) and "\n" not in found) if reason else not found
    assert ("no" in {check.state for check in check_gpus(fake)}) is bool(reason)


def test_machine_check_without_gpus_prints_one_line() -> None:
    """An empty CUDA_VISIBLE_DEVICES hides the GPUs of the machine."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "repro.launch.doctor.machine"], capture_output=True, text=True, env=hidden
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "gpus-per-task = 1"),
        ({"SLURM_GPUS_PER_TASK": "v100:1", "SLURM_GPUS_ON_NODE": "1"}, "gpus-per-task = v100:1"),
        ({"SLURM_GPU_BIND": "single:1"}, "gpu-bind = single:1"),
        ({"SLURM_NTASKS_PER_GPU": "1"}, "ntasks-per-gpu = 1"),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "gpus-per-task = 1"),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "1,2"}, "gpus-per-task = 1"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "this task sees only 1 of the job's 8 GPUs on this node"),
    ],
)
def test_task_with_one_visible_gpu_of_several_is_limited(environment: dict[str, str], found: str) -> None:
    (check,) = check_task_binding(environment, visible=1)
    assert (check.state, check.fatal) == ("limited", False)
    assert check.found.startswith(found)
    assert "gpu-bind=none" in check.enables
    assert check_task_binding(environment, visible=8) == []


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
def test_task_with_the_only_gpu_is_not_limited(environment: dict[str, str]) -> None:
    assert check_task_binding(environment, visible=1) == []


def test_profile_that_binds_several_gpus_is_reported() -> None:
    assert check_profile_binding({"reservation": "bench", "gpu-bind": "none"}, 8) == []
    (check,) = check_profile_binding({"reservation": "bench", "gpu-bind": "map_gpu:0,1"}, 2)
    assert check.found == "gpu-bind = map_gpu:0,1: a task may see only some of its node's GPUs"
    for gpus in (0, 1):
        assert check_profile_binding({"gpus-per-task": "1"}, gpus) == []
