"""Tests of provenance."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from repro.measure import provenance as module
from repro.measure.provenance import environment, git_state, gpus, provenance, torch_build

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        [*GIT, "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one\n")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_provenance_is_json_with_the_documented_keys() -> None:
    record = json.loads(json.dumps(provenance(), allow_nan=False))
    documented = "git packages torch python os cpu memory gpus environment host"
    assert set(record) == set(documented.split())
    assert record["packages"]["torch"]
    assert record["cpu"]["usable_cores"] >= 1
    assert record["memory"]["total_bytes"] > 2**28


def test_provenance_reads_torchs_build_without_importing_torch() -> None:
    code = (
        "import sys, json; from repro.measure.provenance import provenance; p = provenance();"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(json.dumps(p['torch']))"
    )
    build = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert build == torch_build()
    assert (build["cuda"], build["git"]) == (torch.version.cuda, torch.version.git_version)


def state(root: Path) -> dict[str, Any]:
    """Return the git state of a checkout that has one."""
    found = git_state(root)
    assert found is not None
    return found


def test_git_state_distinguishes_changed_and_untracked_files(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert git_state(checkout) == {"commit": commit, "dirty": False, "diff": None}
    hashes = set()
    for name, text in (("file", "two\n"), ("file", "three\n"), ("new", "a"), ("new", "b")):
        (checkout / name).write_text(text)
        assert (state(checkout)["commit"], state(checkout)["dirty"]) == (commit, True)
        hashes.add(state(checkout)["diff"])
    assert len(hashes) == 4


def test_git_state_is_unknown_if_a_command_fails(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    run, commit = subprocess.run, state(checkout)["commit"]

    def fail_one(failing: str, command: list[str], **options: Any) -> Any:
        return run(["false"] if failing in command else command, **options)

    for failing in ("diff", "ls-files"):
        with mock.patch.object(subprocess, "run", partial(fail_one, failing)):
            assert git_state(checkout) == {"commit": commit, "dirty": None, "diff": None}
    with mock.patch.object(subprocess, "run", side_effect=subprocess.TimeoutExpired("git", 10)):
        assert git_state(checkout) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(checkout) is None


def test_git_state_without_commit_or_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one\n")
    assert (state(tmp_path)["commit"], state(tmp_path)["dirty"]) == (None, True)
    (inner := tmp_path / "site-packages").mkdir()
    assert git_state(inner) is None, "a package inside another checkout"


def test_environment_has_listed_and_no_private_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    safe = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"}
    of_slurm = [f"SLURM_{name}" for name in ("JWT", "JOB_USER", "SUBMIT_DIR", "JOB_NODELIST")]
    private = [*of_slurm, "TORCH_HOME", "AWS_SECRET"]
    for key, value in (safe | dict.fromkeys(private, "x")).items():
        monkeypatch.setenv(key, value)
    found = environment()
    assert safe.items() <= found.items()
    assert not found.keys() & set(private)


def test_gpu_fields_that_the_driver_refuses_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeNvml:
        NVMLError = KeyError

        def __getattr__(self, name: str) -> Any:
            return 0 if name.startswith("NVML_") else lambda *_: reported[name]

    reported = {
        **dict.fromkeys(("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex")),
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetName": b"V100",
        "nvmlDeviceGetCudaComputeCapability": (7, 0),
        "nvmlDeviceGetEccMode": (1, 0),  # enabled now, disabled after the next restart
        "nvmlDeviceGetMigMode": (0, 1),
    }
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    (gpu,) = gpus()
    assert (gpu["name"], gpu["compute_capability"], gpu["memory_bytes"]) == ("V100", "7.0", None)
    assert (gpu["ecc"], gpu["mig"]) == (True, False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == [], "no driver"


def test_cpu_properties_are_read_from_system_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: asimd sve\n\nprocessor\t: 1\nFeatures\t: none\n")
    assert module._cpuinfo(path)["Features"] == "asimd sve", "another architecture has other fields"
    assert module._cpuinfo(tmp_path / "missing") == {}
    for file, content, turbo in (
        ("intel_pstate/no_turbo", "0", True),
        ("intel_pstate/no_turbo", "1", False),
        ("cpufreq/boost", "1", True),
        ("cpufreq/boost", "0", False),
        ("other", "1", None),
    ):
        monkeypatch.setattr(module, "_read", {Path("/sys/devices/system/cpu") / file: content}.get)
        assert module.cpu()["turbo"] is turbo
