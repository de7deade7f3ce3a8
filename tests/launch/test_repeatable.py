"""A training that asks for the same bits gets torch's deterministic algorithms, in its own steps alone."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.config.enums import Phase
from repro.kernels.cuda.program import SOURCES
from repro.launch.job import Job
from repro.launch.rank import session
from repro.launch.rank.experiment import Run
from repro.launch.rank.repeatable import ENVIRONMENT, deterministic
from repro.parallel import mesh as meshes
from tests.launch.test_session import Silent
from tests.training import tiny


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the session sets is gone afterwards."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


@pytest.mark.parametrize("asked", [False, True])
def test_the_session_sets_what_a_process_reads_once(asked: bool, clean: None) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "2"
    pair = [tiny(Layout(), steps=2, untimed_steps=1, deterministic=each) for each in (False, asked)]
    beacon: Any = Silent()
    torch.set_num_threads(1)
    session.run_rank(Job(experiments=pair), rank=0, world=1, device="cpu", rendezvous="", beacon=beacon)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if asked else None)
    assert os.environ["NCCL_NVLS_ENABLE"] == "2", "what somebody has set stays"


@pytest.mark.parametrize("asked", [False, True])
def test_steps_are_taken_so_and_nothing_else_is(asked: bool) -> None:
    seen: list[bool] = []

    def report(step: int, phase: Phase) -> None:
        if phase is Phase.OPTIMIZER:
            seen.append(torch.are_deterministic_algorithms_enabled())

    run = Run(
        tiny(Layout(), steps=3, untimed_steps=1, deterministic=asked),
        meshes.single(),
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
        with pytest.raises(RuntimeError, match="of the step, False"), deterministic(True):
            raise RuntimeError(f"of the step, {torch.is_deterministic_algorithms_warn_only_enabled()}")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory is filled  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted(SOURCES.glob("**/*.cu*")), ids=lambda path: path.name)
def test_our_kernels_add_in_one_order(path: Path) -> None:
    """No sum depends on which block comes first."""
    assert not re.search(r"atomic|\bred\.|\batom\.", path.read_text(), re.IGNORECASE)
