"""The kit that `make test-gpu-kit` made, unpacked on a machine without a network."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from tests.gpu_kit.target import make_target

KIT = os.environ.get("REPRO_GPU_KIT", "")


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked kit."""
    if not KIT:
        pytest.skip("run by make test-gpu-kit")
    folder = tmp_path_factory.mktemp("kit")
    with tarfile.open(KIT) as archive:
        archive.extractall(folder)
    return folder / "gpu-kit"


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of the machine."""
    return make_target(tmp_path_factory.mktemp("target"))
