"""Tests of pools of ranks, and of the groups of pytest-xdist that keep tests with common fixtures on one worker."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankPool

ROOT = Path(__file__).parents[1]
PROGRAM = """
import operator, time, torch
from tests import pool as pools

pools.PRELOADED[:] = ["torch.distributed"]  # the only module that these ranks use
with pools.RankPool(2) as pool:
    assert [found.tolist() for found in pool.run(operator.mul, torch.ones(3), 2)] == [[2.0] * 3] * 2
    try:
        pool.run(time.sleep, 60, timeout_s=0.5)
    except AssertionError:
        pool.run(operator.neg, torch.ones(3))
"""


def test_pools_leave_no_files_in_the_temporary_folder(tmp_path: Path) -> None:
    """The pool sends and receives tensors, is killed because of a hanging rank, and starts new ranks."""
    with tempfile.TemporaryDirectory() as folder:  # the path of pytest's folder is too long for a socket
        variables = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | variables, check=True)
        assert os.listdir(folder) == []


def fail_on_rank_1() -> None:
    """Raise on rank 1 while rank 0 waits in a collective."""
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def hang() -> None:
    time.sleep(600)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_error_names_the_failed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is not the time-out of the waiting rank."""
    monkeypatch.setattr("tests.pool.GRACE_S", 0.1)
    with RankPool(2) as pool, pytest.raises(AssertionError, match=r"rank 1:(.|\n)*the cause"):
        pool.run(fail_on_rank_1)


def test_a_pool_is_usable_after_a_hang_and_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a hanging rank has its stack, and a test must not get answers to an earlier, interrupted test."""
    with RankPool(1) as pool:
        with pytest.raises(AssertionError, match=r"rank 0 did not answer within 0.5 s(.|\n)*time.sleep"):
            pool.run(hang, timeout_s=0.5)
        assert pool.run(abs, -1) == [1]
        with monkeypatch.context() as patched:
            patched.setattr("tests.pool.wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.run(abs, -2)
        assert pool.run(abs, -3) == [3]


def test_xdist_appends_the_group_to_a_test_name(pytestconfig: pytest.Config) -> None:
    """Without the group in the test's name, pytest-xdist distributes tests individually."""
    has_groups = bool(getattr(pytestconfig.option, "loadgroup", False))
    name = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
    assert name.endswith(f"@{__file__}") == has_groups, "pytest 9.2 with pytest-xdist 3.8 appends the group"
