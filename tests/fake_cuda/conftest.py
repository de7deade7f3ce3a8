"""The fake device, started once for all ordinary tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda import faults
from tests.fake_cuda.cases import PIECES, QUICK, Answers, audited, compiled


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for CUDA's runtime, compiled."""
    return compiled(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(scope="session")
def quick(runtime: Path) -> Answers:
    """What is said of the cases of the ordinary tests."""
    return audited(runtime, [*QUICK, *faults.CASES, PIECES])
