"""Which of a machine's cores the ranks of an emulated network compute on, and which carry their messages."""

from __future__ import annotations

import os
import threading


def computing(cores: int) -> int:
    """On how many of a machine's cores ranks compute.  The other half carries their messages, with what the kernel does
    for these, which would else interrupt whoever computes and be charged to it.  One core does both."""
    return max(1, cores // 2)


class DividedCores:
    """The cores that this process may use, as they are when this is made, divided."""

    def __init__(self, place: int):
        """`place`: which of the processes on these cores this is."""
        cores = sorted(os.sched_getaffinity(0))
        compute = cores[: computing(len(cores))]
        self.own = {compute[place % len(compute)]}
        """Where it computes."""
        self.carrying = set(cores[len(compute) :]) or set(cores)
        """Where messages are carried: of one core, the same."""

    def divide(self) -> None:
        """Put this thread on its own core and the process's others, which carry messages, where those are carried.

        Threads that are made later are where the one is that makes them: to be called again once they are there.
        """
        here = threading.get_native_id()
        for name in os.listdir("/proc/self/task"):
            thread = int(name)
            try:
                os.sched_setaffinity(thread, self.own if thread == here else self.carrying)
            except ProcessLookupError:  # it has ended
                continue
