"""Pools of ranks say what went wrong, and leave nothing behind: hundreds of folders lay in /tmp after some days."""

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

pools.PRELOADED[:] = ["torch.distributed"]  # all that is used here
with pools.RankPool(2) as pool:
    assert [found.tolist() for found in pool.run(operator.mul, torch.ones(3), 2)] == [[2.0] * 3] * 2
    try:
        pool.run(time.sleep, 60, timeout_s=0.5)
    except AssertionError:
        pool.run(operator.neg, torch.ones(3))
"""


def test_nothing_stays_in_the_temporary_folder(tmp_path: Path) -> None:
    """Tensors go to the ranks and back, a rank hangs and its pool is killed, and another one starts."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own has too long a name for a socket
        own = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | own, check=True)
        assert os.listdir(folder) == []


def fail_on_the_second() -> None:
    """It raises while the first waits for it."""
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def test_the_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silence of the one that waits for it was all that was said, after a minute and a half."""
    monkeypatch.setattr("tests.pool.GRACE_S", 0.1)
    with RankPool(2) as pool, pytest.raises(AssertionError, match=r"rank 1:(.|\n)*the cause"):
        pool.run(fail_on_the_second)


def test_a_rank_that_hangs_says_where() -> None:
    """With the line that it waits at."""
    with (
        RankPool(1) as pool,
        pytest.raises(AssertionError, match=r"rank 0 did not answer within 0.5 s(.|\n)*time.sleep"),
    ):
        pool.run(hang, timeout_s=0.5)


def test_answers_of_a_test_that_was_stopped_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's limit interrupts whoever waits; the next test was told what that one had asked."""
    with RankPool(1) as pool:
        pool.run(abs, -1)
        with monkeypatch.context() as patched:
            patched.setattr("tests.pool.wait", stopped)
            with pytest.raises(KeyboardInterrupt):
                pool.run(abs, -2)
        assert pool.run(abs, -3) == [3]


def stopped(*_: object) -> None:
    """What a signal's handler does."""
    raise KeyboardInterrupt


def hang() -> None:
    """Longer than anybody waits."""
    time.sleep(600)
