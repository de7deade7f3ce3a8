"""Where the threads of a rank are: the one that computes on its core, those that carry messages on the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from repro.util.cores import DividedCores

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
    DividedCores(place).divide()
    assert asked[threading.get_native_id()] == {own}
    assert asked[another] == {4, 7}


def test_one_core_does_both(asked: Affinity, another: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    DividedCores(3).divide()
    assert asked[threading.get_native_id()] == asked[another] == {5}


def test_a_thread_that_has_ended_is_no_mistake(asked: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(thread: int, cores: set[int]) -> None:
        raise ProcessLookupError(thread)

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    DividedCores(0).divide()
