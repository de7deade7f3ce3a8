"""Holds a rank that shares a core to its share of it: it computes no faster while the others wait.

Sixteen ranks of a core compute at a sixteenth of its rate each; when fifteen of them wait for messages the last would
compute sixteen times as fast, and the time of the messages would vanish in that.  So a rank that has computed for `c`
seconds sleeps until `c / share` seconds have passed, those not counted in which it waited for others.  It does so
before each message, before each wait for one (which goes on meanwhile, as beside a device that still computes) and, for
libraries that do not say when they send, whenever the kernel's timer of processor time says so; not again before each
of the thirty messages that gloo makes of a collective of sixteen ranks, since whoever wakes finds others' data in the
cache and computes for longer.  Only the thread that computes is held; those that carry messages are not, and are on
other cores (`repro.util.processes`): a kernel without `IRQ_TIME_ACCOUNTING` charges whoever has a core with the frames
that come there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch.distributed as dist

from repro.parallel import transports

MAX_CATCH_UP_S = 0.02
"""What a rank that was kept from its core may make up for later, at most."""
TIMER_INTERVAL_S = 4e-3


class Throttle:
    """Holds the main thread, from `start` to `stop`."""

    def __init__(self, share: float):
        """`share`: seconds in each second that it computes.  To be made by the thread that it holds."""
        self.share = share
        self._delays = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._ahead = 0.0
        self._settling = self._waiting = False
        self._waits = [(kind, kind.wait) for kind in (dist.Work, transports.Work)]
        """Of libraries, and ours."""
        self._look()

    def start(self) -> None:
        """Settle on the kernel's timer and before waits too."""
        for kind, wait in self._waits:
            kind.wait = self._settled(wait)  # type: ignore[method-assign]
        signal.signal(signal.SIGVTALRM, self._tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, TIMER_INTERVAL_S, TIMER_INTERVAL_S)
        self._look()

    def stop(self) -> None:
        """Let the thread go."""
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
        for kind, wait in self._waits:
            kind.wait = wait  # type: ignore[method-assign]

    def settle(self) -> None:
        """Sleep for what a slower device would have needed beyond what has passed."""
        if self._settling:
            return
        self._settling = True
        computed = time.thread_time() - self._computed
        passed = computed + self._delay() - self._delayed
        self._ahead += computed / self.share - passed
        if self._ahead > 0:
            began = time.perf_counter()
            time.sleep(self._ahead)
            self._ahead -= time.perf_counter() - began
        self._ahead = max(self._ahead, -MAX_CATCH_UP_S)
        self._look()
        self._settling = False

    def _settled(self, wait: Any) -> Any:
        held = threading.get_ident()

        def settled(work: Any, *arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != held or self._waiting:
                return wait(work, *arguments, **named)
            self.settle()
            self._waiting = True
            try:
                return wait(work, *arguments, **named)
            finally:
                self._waiting = False

        return settled

    def _look(self) -> None:
        self._delayed = self._delay()
        self._computed = time.thread_time()  # last: looking is no computing

    def _delay(self) -> float:
        """Seconds for which the thread could have run and another one had its core."""
        return int(os.pread(self._delays, 64, 0).split()[1]) / 1e9

    def _tick(self, number: int, frame: FrameType | None) -> None:
        self.settle()
