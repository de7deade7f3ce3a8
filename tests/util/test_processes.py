"""Tests of core affinity, of freed memory that remains in a process, and of workers that end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from unittest.mock import Mock

import pytest

from repro.launch.rank_process import process_state
from repro.util.processes import CoreAssignment, Workers
from tests.launch.runs import wait_for

Affinity = dict[int, set[int]]


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> Affinity:
    """Record the cores that each thread is assigned; the process has four cores."""
    found: Affinity = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.update({pid: set(cores)}))
    return found


@pytest.fixture
def thread() -> Iterator[int]:
    """Start a second thread, and return its id."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(threading.get_native_id).result()


@pytest.mark.parametrize(("index", "core"), [(0, 1), (1, 3), (2, 1), (7, 3)])
def test_compute_has_a_separate_core(affinity: Affinity, thread: int, index: int, core: int) -> None:
    CoreAssignment(index).apply()
    assert affinity[threading.get_native_id()] == {core}
    assert affinity[thread] == {4, 7}


def test_threads_share_one_core(affinity: Affinity, thread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    CoreAssignment(3).apply()
    assert affinity[threading.get_native_id()] == affinity[thread] == {5}


def test_an_ended_thread_is_ignored(affinity: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=ProcessLookupError))
    CoreAssignment(0).apply()


PROGRAM = """
import resource, sys, torch
from repro.util import processes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [torch.ones(size << 20, dtype=torch.uint8) for size in (40, 3, 9)]

torch.set_num_threads(1)
if "keep" in sys.argv:
    processes.keep_freed_memory()
step()
if "keep" in sys.argv:
    processes.reserve_heap(52 << 20, 1)
before = faults()
for _ in range(3):
    step()
print(faults() - before)
"""
STEP_PAGES = 3 * (52 << 20) // 4096


def count_page_faults(*args: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_only_kept_memory_is_reused_without_page_faults() -> None:
    assert count_page_faults("keep") < 200
    assert count_page_faults() > STEP_PAGES / 2


def test_interrupted_process_terminates_its_workers() -> None:
    """Otherwise, Python would wait at exit until the workers finish their current calls."""
    others = set(active_children())  # workers of other tests
    with suppress(KeyboardInterrupt), Workers(2) as workers:
        workers.count = 2
        for _ in workers.completed(time.sleep, [(0,), (100,)]):
            raise KeyboardInterrupt
    wait_for(lambda: not set(active_children()) - others)


USES_WORKERS = """
import os, time
from repro.util import processes
processes.PRELOADED.clear()
if __name__ == "__main__":
    with processes.Workers() as some:
        some.count = 2
        print(*some.completed(os.getpid, [()] * 2), flush=True)
        list(some.completed(time.sleep, [(100,)] * 2))
"""


def test_workers_end_after_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "uses_workers.py"
    script.write_text(USES_WORKERS)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # Python reports leaked resources
    with subprocess.Popen([sys.executable, script], text=True, **streams) as process:
        assert process.stdout is not None
        worker_pids = {int(number) for number in process.stdout.readline().split()}
        assert worker_pids
        process.kill()
    wait_for(lambda: not any(map(process_state, worker_pids)))
