"""Tests of `Interrupt`, which stores a received signal, and of workers that end with their parent process."""

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
from repro.launch.rank_process import process_state
from repro.util.processes import Workers
from tests.launch.runs import wait_for

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def restore_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_second_signal_sets_the_stop_timeout_to_zero(number: int) -> None:
    for one in SIGNALS:
        signal.signal(one, signal.default_int_handler)
    with Interrupt() as interrupt:
        assert (bool(interrupt), interrupt.reason, interrupt.stop_s) == (False, "", STOP_TIMEOUT_S)
        os.kill(os.getpid(), number)
        assert (interrupt.signal, interrupt.reason) == (number, "stopped by the user")
        assert interrupt.stop_s == STOP_TIMEOUT_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupt.signal, interrupt.again, interrupt.stop_s) == (number, True, 0.0)
    assert all(signal.getsignal(one) is signal.default_int_handler for one in SIGNALS)


def test_ignored_signals_remain_ignored() -> None:
    """`nohup repro run` continues after its terminal closes, and SIGTERM still stops the run."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


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
    quiet = subprocess.DEVNULL  # Python reports the leaked resources of the killed process
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=quiet, text=True
    ) as process:
        assert process.stdout is not None
        worker_pids = {int(number) for number in process.stdout.readline().split()}
        assert worker_pids
        process.kill()
    wait_for(lambda: not any(map(process_state, worker_pids)))
