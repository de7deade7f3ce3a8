"""Fixtures of the fake device: the compile_runtime runtime, and one audit of all cases that are not slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda import faults
from tests.fake_cuda.cases import ADAMW, QUICK, Answers, audit, compile_runtime


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the replacement for CUDA's runtime."""
    return compile_runtime(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(scope="session")
def quick(runtime: Path) -> Answers:
    """Return the audit's answers for the cases of the tests that are not slow."""
    return audit(runtime, [*QUICK, *faults.CASES, ADAMW])
