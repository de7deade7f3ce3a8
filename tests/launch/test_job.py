"""Signals as a flag, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

import pytest

from repro.launch.job import STOP_TIMEOUT_S, Interrupt
from repro.util.processes import Workers
from tests.launch.runs import wait_for

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_sets_the_flag_and_a_second_one_does_not_want_to_wait(number: int) -> None:
    for one in NUMBERS:
        signal.signal(one, signal.default_int_handler)
    with Interrupt() as interrupt:
        assert (bool(interrupt), interrupt.reason, interrupt.stop_s) == (False, "", STOP_TIMEOUT_S)
        os.kill(os.getpid(), number)
        assert (interrupt.signal, interrupt.reason) == (number, "stopped by the user")
        assert interrupt.stop_s == STOP_TIMEOUT_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupt.signal, interrupt.again, interrupt.stop_s) == (number, True, 0.0)
    assert all(signal.getsignal(one) is signal.default_int_handler for one in NUMBERS)


def test_what_is_ignored_stays_so() -> None:
    """`nohup repro run` goes on when its terminal is closed, and still stops when it is asked to."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_workers_are_not_waited_for_by_who_stops() -> None:
    """Python would join at its end what they are at, and a second Ctrl-C would show where it does."""
    others = set(active_children())  # pools of ranks stay for other tests
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


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "uses_workers.py"
    script.write_text(USES_WORKERS)
    quiet = subprocess.DEVNULL  # what it did not clean up is said after it
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=quiet, text=True
    ) as process:
        assert process.stdout is not None
        found = {int(number) for number in process.stdout.readline().split()}
        assert found
        process.kill()
    wait_for(lambda: not any(_runs(number) for number in found))


def _runs(number: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
