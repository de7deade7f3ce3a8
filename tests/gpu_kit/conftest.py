"""Fixtures of the GPU kit tests: the unpacked kit of `make test-gpu-kit`, and the target's Python."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from tests.gpu_kit.target import make_target

KIT = os.environ.get("REPRO_GPU_KIT", "")


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the kit and return its folder."""
    if not KIT:
        pytest.skip("run by make test-gpu-kit")
    folder = tmp_path_factory.mktemp("kit")
    with tarfile.open(KIT) as archive:
        archive.extractall(folder)
    return folder / "gpu-kit"


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a target that has only torch, numpy and transformers."""
    return make_target(tmp_path_factory.mktemp("target"))
