"""Seconds of a thread's own code: without the kernel's, and of that thread alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.host import user_clock
from repro.host.user_clock import PERIOD_S, UserClock

SPENT_S = 0.1


def own_code() -> None:
    sum(range(10000))


def kernels_code() -> None:
    os.pread(ZEROS, 1 << 20, 0)


ZEROS = os.open("/dev/zero", os.O_RDONLY)


def spend(call: Callable[[], None]) -> float:
    """Seconds that the kernel says this thread had a core for, most of them in `call`."""
    began = time.thread_time()
    while time.thread_time() < began + SPENT_S:
        call()
    return time.thread_time() - began


@pytest.fixture
def clock() -> UserClock:
    found = UserClock()
    if not found.exact:
        paranoid = Path("/proc/sys/kernel/perf_event_paranoid")
        said = paranoid.read_text().strip() if paranoid.exists() else "not there"
        pytest.skip(f"this kernel gives no samples of a thread (perf_event_paranoid: {said})")
    return found


def test_a_threads_own_code_counts_and_the_kernels_does_not(clock: UserClock) -> None:
    began = clock()
    charged = spend(own_code)
    own = clock() - began
    assert 0.4 * charged < own < charged + 2 * PERIOD_S  # frames for others may have come meanwhile
    charged = spend(kernels_code)
    assert clock() - began - own < 0.2 * charged


def test_other_threads_do_not_count(clock: UserClock) -> None:
    began = clock()
    other = threading.Thread(target=spend, args=(own_code,))
    other.start()
    other.join()
    assert clock() - began < 0.2 * SPENT_S


@pytest.mark.parametrize("refuses", ["unknown processor", "kernel", "locked pages"])
def test_a_kernel_that_gives_no_samples_leaves_all_seconds_of_the_thread(
    monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    def refuse(*given: object, **keys: object) -> None:
        raise PermissionError(1, "no")

    if refuses == "unknown processor":
        monkeypatch.setattr(user_clock.platform, "machine", lambda: "abacus")
    elif refuses == "kernel":
        monkeypatch.setattr(user_clock, "_CALL", dict.fromkeys(user_clock._CALL, -1))  # ENOSYS
    else:
        monkeypatch.setattr(user_clock.mmap, "mmap", refuse)
    clock = UserClock()
    assert not clock.exact
    before, said, after = time.thread_time(), clock(), time.thread_time()
    assert before <= said <= after
