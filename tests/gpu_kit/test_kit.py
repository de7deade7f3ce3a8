"""Tests of `make gpu-kit`: the kit's contents for a target, and the error without a package index."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from repro.measure.provenance import KIT_FILE, git_state

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """Import the program of `make gpu-kit`."""
    pytest.importorskip("pip")
    spec = importlib.util.spec_from_file_location("kit", ROOT / "gpu" / "kit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_option_accepts_a_version_or_a_program(maker: ModuleType) -> None:
    assert maker.python_version("3.12") == "3.12"
    assert maker.python_version("python3.10") == "3.10"
    assert maker.python_version("3.12.3") == "3.12"
    assert maker.python_version(sys.executable) == f"3.{sys.version_info[1]}"
    with pytest.raises(SystemExit, match="must be a version"):
        maker.python_version("snake")


def test_platform_tags_include_old_and_new_manylinux(maker: ModuleType) -> None:
    tags = maker.platform_tags("x86_64")
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64"} <= set(tags)
    assert not any("x86" in tag for tag in maker.platform_tags("aarch64"))
    assert maker.platform_tags("manylinux_2_28_x86_64") == ["manylinux_2_28_x86_64"]


def test_requirement_markers_are_evaluated_for_the_target(maker: ModuleType) -> None:
    """Packages that the target has are excluded, whatever the spelling of their names."""
    lines = [
        "torch>=2.6",
        "Typing_Extensions>=4; python_version < '3.11'",
        "tomli>=2; python_version >= '3.11'",
        "colorama; platform_system == 'Windows'",
        "pytz; extra == 'zone'",
        "nvidia.ml-py>=12",
        "pydantic[email]>=2.7",
    ]
    found = maker.missing_requirements(lines, {"torch", "nvidia-ml-py"}, "3.10", "x86_64")
    assert found == {"typing-extensions": "Typing_Extensions>=4", "pydantic": "pydantic[email]>=2.7"}
    found = maker.missing_requirements(maker.project_requirements(), {"torch", "numpy"}, "3.12", "x86_64")
    assert {"pydantic", "submitit", "pyroute2", "nvidia-ml-py", "pytest", "hypothesis"} <= set(found)
    assert not found.keys() & {"torch", "numpy", "deepspeed", "playwright"}


def test_a_missing_package_index_gives_a_one_line_error(tmp_path: Path) -> None:
    """No partial archive remains."""
    pytest.importorskip("pip")
    output = tmp_path / "kit.tar.gz"
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(ROOT / "gpu" / "kit.py"), "--output", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no wheels of ")
    assert "needs a package index" in done.stderr
    assert not output.exists()


def test_records_from_a_kit_have_the_commit_of_the_kit(tmp_path: Path) -> None:
    state = {"commit": "0123456789", "dirty": False, "diff": None}
    (tmp_path / KIT_FILE).write_text(json.dumps({"python": "3.12", "git": state}), encoding="utf-8")
    assert git_state(tmp_path) == state


def test_a_missing_package_of_the_target_is_named_at_startup(tmp_path: Path) -> None:
    """The GPU day starts nevertheless, because most of its steps may not need this package."""
    for name in ("source", "packages", "gpu"):
        (tmp_path / name).mkdir()
    shutil.copy2(ROOT / "gpu" / "start.py", tmp_path / "gpu")
    facts = {"python": f"3.{sys.version_info[1]}", "present": ["no-such-package", "torch"]}
    (tmp_path / "source" / "kit.json").write_text(json.dumps(facts))
    command = [sys.executable, str(tmp_path / "gpu" / "start.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lacks no-such-package, which the kit leaves out" in done.stderr
    assert "gpu-tests" in done.stdout
