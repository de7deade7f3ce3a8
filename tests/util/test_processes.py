"""Core affinity of a rank's threads, and freed memory that stays in the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from repro.util.processes import CoreAssignment

Affinity = dict[int, set[int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Affinity:
    """By thread, where it was put; this process has four cores."""
    found: Affinity = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.update({pid: set(cores)}))
    return found


@pytest.fixture
def another() -> Iterator[int]:
    """A second thread, which waits."""
    end, number = threading.Event(), []
    started = threading.Event()

    def wait() -> None:
        number.append(threading.get_native_id())
        started.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    yield number[0]
    end.set()
    thread.join()


@pytest.mark.parametrize(("place", "own"), [(0, 1), (1, 3), (2, 1), (7, 3)])
def test_one_half_computes_and_the_other_carries(asked: Affinity, another: int, place: int, own: int) -> None:
    CoreAssignment(place).apply()
    assert asked[threading.get_native_id()] == {own}
    assert asked[another] == {4, 7}


def test_one_core_does_both(asked: Affinity, another: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    CoreAssignment(3).apply()
    assert asked[threading.get_native_id()] == asked[another] == {5}


def test_a_thread_that_has_ended_is_no_mistake(asked: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(thread: int, cores: set[int]) -> None:
        raise ProcessLookupError(thread)

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    CoreAssignment(0).apply()


STEPS = """
import resource, sys, torch
from repro.util import processes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [torch.ones(size << 20, dtype=torch.uint8) for size in (40, 3, 9)]

torch.set_num_threads(1)
if "kept" in sys.argv:
    processes.keep_freed_memory()
step()
if "kept" in sys.argv:
    processes.reserve_heap(52 << 20, 1)
before = faults()
for _ in range(3):
    step()
print(faults() - before)
"""
PAGES = 3 * (52 << 20) // 4096


def faults_of_three_steps(*message: str) -> int:
    done = subprocess.run([sys.executable, "-c", STEPS, *message], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_what_was_freed_is_taken_again_without_a_page_fault() -> None:
    assert faults_of_three_steps("kept") < 200


def test_and_would_not_be() -> None:
    assert faults_of_three_steps() > PAGES / 2
