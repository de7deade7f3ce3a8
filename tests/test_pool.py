"""Pools of ranks leave nothing behind: hundreds of folders lay in /tmp after some days of tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import operator, time, torch
from tests import pool as pools

pools.PRELOADED[:] = ["torch.distributed"]  # all that is used here
with pools.RankPool(2) as pool:
    assert [found.tolist() for found in pool.run(operator.mul, torch.ones(3), 2)] == [[2.0] * 3] * 2
    try:
        pool.run(time.sleep, 60, timeout_s=0.5)
    except TimeoutError:
        pool.run(operator.neg, torch.ones(3))
"""


def test_nothing_stays_in_the_temporary_folder(tmp_path: Path) -> None:
    """Tensors go to the ranks and back, a rank hangs and its pool is killed, and another one starts."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own has too long a name for a socket
        own = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | own, check=True, timeout=100)
        assert os.listdir(folder) == []
