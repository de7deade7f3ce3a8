"""A training that asks for the same bits gets torch's deterministic algorithms, in its own steps alone."""

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


@pytest.mark.parametrize("asked", [False, True])
def test_steps_are_taken_so_and_nothing_else_is(asked: bool) -> None:
    seen: list[bool] = []

    def report(step: int, phase: Phase) -> None:
        if phase is Phase.OPTIMIZER:
            seen.append(torch.are_deterministic_algorithms_enabled())

    run = ExperimentRun(
        tiny(Layout(), steps=3, untimed_steps=1, deterministic=asked),
        meshes.single_rank_mesh(),
        torch.device("cpu"),
        report,
    )
    run.prelude()
    assert set(seen) == {asked}
    assert not torch.are_deterministic_algorithms_enabled()


def test_settings_are_as_they_were_afterwards_whatever_happens() -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(RuntimeError, match="of the step, False"), deterministic_algorithms(True):
            raise RuntimeError(f"of the step, {torch.is_deterministic_algorithms_warn_only_enabled()}")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory is filled  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted(SOURCES.glob("**/*.cu*")), ids=lambda path: path.name)
def test_our_kernels_add_in_one_order(path: Path) -> None:
    """No sum depends on which block comes first."""
    assert not re.search(r"atomic|\bred\.|\batom\.", path.read_text(), re.IGNORECASE)
