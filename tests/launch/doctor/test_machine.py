"""Tests of `repro doctor` and `make test-gpu`: checks of this machine, its GPUs and their torch build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro import cli
from repro.launch.doctor import machine
from repro.launch.doctor.machine import (
    check_gpus,
    check_profile_binding,
    check_task_binding,
    examine_machine,
    has_kernels_for,
    unusable_reason,
)


def test_this_machine_is_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without --details, passed checks are listed by name, and only failed and limited checks have a row."""
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--results", str(tmp_path), "--details"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Suites can be run here.\n")
    for words in ("\nyes      python", "data, tensor and ZeRO"):
        assert words in text
    checks = examine_machine(tmp_path)
    assert {check.name for check in checks} >= {
        *("python", "processor", "memory", "disk", "torch", "gloo", "CUDA", "NCCL", "kernels", "SLURM")
    }
    assert all(check.found and check.enables and check.state in ("yes", "limited", "no") for check in checks)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["doctor", "--results", str(tmp_path)]) == 0
    passed, _, rows = capsys.readouterr().out.partition("\n\n")
    for check in checks:
        assert check.state != "yes" or check.name in " ".join(passed.split())
        assert (f"\n{check.state:<9}{check.name} " in rows) == (check.state != "yes")
    assert cli.main(["doctor", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["usable"]
    assert {"name", "state", "found", "enables", "fatal"} == set(document["checks"][0])


def test_doctor_fails_without_torch(tmp_path: Path) -> None:
    """A new interpreter is necessary, because modules of this process have imported torch."""
    program = (
        "import sys; sys.modules['torch'] = None; from repro import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "doctor", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "until these checks pass: torch" in done.stdout) == (1, True), done.stderr


def test_unwritable_results_folder_is_fatal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine._disk(tmp_path / "file" / "results").fatal, "no folder can be below a file"
    assert not machine._disk(tmp_path / "results").fatal
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine._disk(tmp_path / "results").fatal


def test_slurm_version_is_read_from_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho slurm 23.11.4\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check = machine._slurm()
    assert (check.state, check.found.split(",")[0]) == ("yes", "slurm 23.11.4")


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


@pytest.mark.parametrize(
    ("capability", "precisions"),
    [((8, 0), "bf16 by tensor cores"), ((7, 0), "no bf16"), ((6, 1), "without tensor cores")],
)
def test_gpu_check_names_precisions_or_missing_kernels(capability: tuple[int, int], precisions: str) -> None:
    name = "sm_{}{}".format(*capability)
    _, device = check_gpus(fake_torch(capability, [name]))
    assert (device.state, precisions in device.enables) == ("yes", True)
    _, device = check_gpus(fake_torch(capability, ["sm_90"]))
    older = "; torch builds for CUDA 12.6 support this GPU" * (capability < (8, 0))
    assert (device.state, device.enables) == ("no", f"this torch has no kernels for {name}{older}")


def test_only_a_single_visible_gpu_has_a_check_of_binding(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"GPUS_PER_TASK": "1"}, "gpus-per-task = 1"),
        ({"GPUS_PER_TASK": "v100:1", "GPUS_ON_NODE": "1"}, "gpus-per-task = v100:1"),
        ({"GPU_BIND": "single:1"}, "gpu-bind = single:1"),
        ({"NTASKS_PER_GPU": "1"}, "ntasks-per-gpu = 1"),
        ({"GPUS_PER_TASK": "1", "STEP_TASKS_PER_NODE": "8(x2)"}, "gpus-per-task = 1"),
        ({"GPUS_PER_TASK": "1", "TASKS_PER_NODE": "1,2"}, "gpus-per-task = 1"),
        ({"GPUS_ON_NODE": "8"}, "this task sees only 1 of the job's 8 GPUs on this node"),
        ({}, ""),
        ({"GPUS_ON_NODE": "1"}, ""),
        ({"GPU_BIND": "none"}, ""),
        ({"GPU_BIND": "verbose,none"}, ""),
        ({"GPUS_PER_TASK": "1", "GPUS_ON_NODE": "1", "STEP_TASKS_PER_NODE": "1"}, ""),
        ({"GPUS_PER_TASK": "1", "TASKS_PER_NODE": "1(x4)"}, ""),
    ],
)
def test_task_with_one_visible_gpu_of_several_is_limited(environment: dict[str, str], found: str) -> None:
    slurm = {f"SLURM_{key}": value for key, value in environment.items()}
    checks = check_task_binding(slurm, visible=1)
    assert len(checks) == bool(found)
    for check in checks:
        assert (check.state, check.fatal, check.found.startswith(found)) == ("limited", False, True)
        assert "gpu-bind=none" in check.enables
    assert check_task_binding(slurm, visible=8) == []


def test_profile_that_binds_several_gpus_is_reported() -> None:
    assert check_profile_binding({"reservation": "bench", "gpu-bind": "none"}, 8) == []
    (check,) = check_profile_binding({"reservation": "bench", "gpu-bind": "map_gpu:0,1"}, 2)
    assert check.found == "gpu-bind = map_gpu:0,1: a task may see only some of its node's GPUs"
    for gpus in (0, 1):
        assert check_profile_binding({"gpus-per-task": "1"}, gpus) == []
