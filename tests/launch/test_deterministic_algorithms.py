"""Tests of deterministic training: torch's deterministic algorithms are enabled only in its steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from repro.config import Layout
from repro.config.enums import Phase
from repro.kernels.cuda.program import SOURCES
from repro.launch.rank.device_settings import deterministic_algorithms
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.training import tiny


@pytest.mark.parametrize("deterministic", [False, True])
def test_only_steps_of_deterministic_experiments_use_deterministic_algorithms(deterministic: bool) -> None:
    seen: list[bool] = []

    def report(step: int, phase: Phase) -> None:
        if phase is Phase.OPTIMIZER:
            seen.append(torch.are_deterministic_algorithms_enabled())

    run = ExperimentRun(
        tiny(Layout(), steps=3, untimed_steps=1, deterministic=deterministic),
        meshes.single_rank_mesh(),
        torch.device("cpu"),
        report,
    )
    run.prelude()
    assert set(seen) == {deterministic}
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_settings_are_restored_after_an_exception() -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(RuntimeError, match="warn_only: False"), deterministic_algorithms(True):
            raise RuntimeError(f"warn_only: {torch.is_deterministic_algorithms_warn_only_enabled()}")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory is filled  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted(SOURCES.glob("**/*.cu*")), ids=lambda path: path.name)
def test_cuda_kernels_use_no_atomic_operations(path: Path) -> None:
    """An atomic addition would make a sum depend on the order of the blocks."""
    assert not re.search(r"atomic|\bred\.|\batom\.", path.read_text(), re.IGNORECASE)
