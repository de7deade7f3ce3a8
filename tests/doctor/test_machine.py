"""The doctor: every check says what it enables; only what stops everything makes it fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro import cli
from repro.cli.views.doctor import lines
from repro.doctor import machine
from repro.doctor.check import Check
from repro.doctor.machine import examine, precisions, runs_on


def by_name(results: Path) -> dict[str, Check]:
    return {check.name: check for check in examine(results)}


def test_this_machine_is_usable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--results", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())  # lines break where the terminal ends
    assert "data, tensor and ZeRO parallelism on this machine's CPUs" in text
    checks = by_name(tmp_path)
    assert {
        "python",
        "processor",
        "memory",
        "disk",
        "torch",
        "gloo",
        "CUDA",
        "NCCL",
        "kernels",
        "SLURM",
    } <= set(checks)
    assert all(
        check.found and check.enables and check.state in ("yes", "limited", "no") for check in checks.values()
    )


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["usable"]
    assert {"name", "state", "found", "enables", "fatal"} == set(document["checks"][0])


def test_without_torch_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["doctor", "--results", str(tmp_path)]) == 1
    assert "until this is mended: torch" in capsys.readouterr().out


def test_results_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert by_name(tmp_path / "results")["disk"].fatal


def test_results_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert by_name(tmp_path / "file" / "results")["disk"].fatal


def fake_torch(capability: tuple[int, int], architectures: list[str], count: int = 1) -> Any:
    device = SimpleNamespace(name="GPU", total_memory=2**35, major=capability[0], minor=capability[1])
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: count,
        get_device_properties=lambda index: device,
        get_arch_list=lambda: architectures,
        nccl=SimpleNamespace(version=lambda: (2, 27, 3)),
    )
    distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.6"), distributed=distributed)


def test_v100_has_no_bf16_whatever_torch_says() -> None:
    _, device = machine._cuda(fake_torch((7, 0), ["sm_70", "sm_80"]))
    assert device.state == "yes"
    assert "no bf16" in device.enables


def test_v100_with_a_torch_that_dropped_it() -> None:
    _, device = machine._cuda(fake_torch((7, 0), ["sm_80", "sm_90"]))
    assert device.state == "no"
    assert "no kernels for sm_70; builds for CUDA 12.6 still do" in device.enables


def test_one_gpu_of_several_that_a_task_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    one = [check.name for check in machine._cuda(fake_torch((9, 0), ["sm_90"]))]
    assert one == ["CUDA", "GPU binding", "cuda:0"]
    assert "GPU binding" not in {
        check.name for check in machine._cuda(fake_torch((9, 0), ["sm_90"], count=4))
    }


def test_several_gpus_and_nccl() -> None:
    checks = machine._cuda(fake_torch((9, 0), ["sm_90"], count=4))
    assert [check.name for check in checks] == ["CUDA", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
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
def test_which_builds_run_where(capability: tuple[int, int], architectures: list[str], runs: bool) -> None:
    assert runs_on(capability, architectures) is runs


def test_precisions_by_compute_capability() -> None:
    assert "bf16 by tensor cores" in precisions((8, 0))
    assert "no bf16" in precisions((7, 0))
    assert "without tensor cores" in precisions((6, 1))


def test_slurm_is_found_by_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho slurm 23.11.4\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check = machine._slurm()
    assert (check.state, check.found.split(",")[0]) == ("yes", "slurm 23.11.4")


def test_lines_fit_the_terminal(tmp_path: Path) -> None:
    for width in (60, 100):
        assert max(map(len, lines(examine(tmp_path), width))) <= width
