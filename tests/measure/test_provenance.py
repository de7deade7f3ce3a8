"""Tests of provenance: JSON data, no torch import, git states, no private values, missing git and drivers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("failing", ["diff", "ls-files"])
def test_changes_are_unknown_if_one_git_command_fails(
    monkeypatch: pytest.MonkeyPatch, checkout: Path, failing: str
) -> None:
    run = subprocess.run

    def fail_one(command: list[str], **options: Any) -> Any:
        return run(["false"] if failing in command else command, **options)

    monkeypatch.setattr(subprocess, "run", fail_one)
    found = state(checkout)
    assert (found["dirty"], found["diff"]) == (None, None)
    assert found["commit"]


def test_git_state_without_commit_or_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one\n")
    assert (state(tmp_path)["commit"], state(tmp_path)["dirty"]) == (None, True)
    (inner := tmp_path / "site-packages").mkdir()
    assert git_state(inner) is None, "a package inside another checkout"


def test_git_state_is_none_without_git_and_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    def slow(*arguments: Any, **keywords: Any) -> None:
        raise subprocess.TimeoutExpired("git", keywords["timeout"])

    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert git_state(checkout) is None
    monkeypatch.setattr(subprocess, "run", slow)
    assert git_state(checkout) is None


def test_environment_has_listed_and_no_private_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    safe = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"}
    private = [
        "SLURM_JWT",
        "SLURM_JOB_USER",
        "SLURM_SUBMIT_DIR",
        "SLURM_JOB_NODELIST",
        "TORCH_HOME",
        "AWS_SECRET",
    ]
    for key, value in (safe | dict.fromkeys(private, "x")).items():
        monkeypatch.setenv(key, value)
    found = environment()
    assert safe.items() <= found.items()
    assert not found.keys() & set(private)


def test_gpu_fields_that_the_driver_refuses_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeNvml:
        NVMLError = RuntimeError

        def __getattr__(self, name: str) -> Any:
            if name.startswith("NVML_"):
                return 0

            def query(*_: Any) -> Any:
                if name not in reported:
                    raise RuntimeError
                return reported[name]

            return query

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


@pytest.mark.parametrize(
    ("file", "content", "turbo"),
    [
        ("intel_pstate/no_turbo", "0", True),
        ("intel_pstate/no_turbo", "1", False),
        ("cpufreq/boost", "1", True),
        ("cpufreq/boost", "0", False),
        ("other", "1", None),
    ],
)
def test_turbo_is_read_from_the_file_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, file: str, content: str, turbo: bool | None
) -> None:
    files = {Path("/sys/devices/system/cpu") / file: content}
    monkeypatch.setattr(module, "_read", files.get)
    assert module.cpu()["turbo"] is turbo


def test_cpuinfo_of_other_architectures(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: asimd sve\n\nprocessor\t: 1\nFeatures\t: none\n")
    assert module._cpuinfo(path)["Features"] == "asimd sve"
    assert module._cpuinfo(tmp_path / "missing") == {}
