"""A rank on an emulated network: measures its compute rate and link bytes, and limits its share of a processor core.

Ranks that share a core must compute at a constant rate, also while other ranks wait for messages. A rank that has
computed for `c` seconds therefore sleeps until `c / share` seconds have passed, without time spent in waits.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from repro.config import EmulatedNetwork
from repro.config.network import core_share
from repro.emulate import compute_rate
from repro.launch.job import NETWORK_FILE, Job
from repro.parallel import transports
from repro.results.record_parts import RankOnNetwork
from repro.util import processes
from repro.util.processes import CoreAssignment, count_compute_cores

RATE_PROBE_S = 0.6
MAX_RATE_ATTEMPTS = 15
MAX_RATE_SPREAD = 0.25
"""Maximum difference between the compute rates of two ranks, relative to the mean of all ranks."""
MAX_CATCH_UP_S = 0.02
"""Maximum lag behind its share of a core that a rank may make up by computing without sleep, in seconds."""
TIMER_INTERVAL_S = 4e-3
"""Processor time after which a rank checks whether it has exceeded its share of a core, in seconds."""


class EmulatedNetworkRank:
    """State of one rank on an emulated network: compute rate, limiter of its core share, and byte counters."""

    def __init__(self, network: EmulatedNetwork, facts: Path, rank: int):
        """Limit this rank's core share and measure compute rates.  Raises `RuntimeError` if ranks differ much."""
        self._world = network.world
        found = json.loads(facts.read_text(encoding="utf-8"))
        self._facts = found if rank == 0 else None
        self._node = ""
        if rank % network.ranks_per_node == 0 and network.nodes > 1:
            self._node = f"/proc/{found['nodes'][network.node_of(rank)]}/net/dev"
        processes.keep_freed_memory()
        self._cores = CoreAssignment(rank)
        self._cores.apply()
        self.throttle = CoreThrottle(core_share(network.world, count_compute_cores(found["cores"])))
        self.throttle.start()
        try:
            self._rate = _equal_rates(network.world, self.throttle)[rank]
        except BaseException:
            # Without `stop`, the timer's signal could kill the rank before it reports the error.
            self.throttle.stop()
            raise

    @staticmethod
    @contextmanager
    def throttled(job: Job, rank: int) -> Iterator[EmulatedNetworkRank | None]:
        """Limit this rank's core share inside the context and yield its state; yield None if no network is emulated."""
        if job.network is None:
            yield None
            return
        seen = EmulatedNetworkRank(job.network, Path(job.folder) / NETWORK_FILE, rank)
        try:
            yield seen
        finally:
            seen.throttle.stop()

    def begin_timed_steps(self, peak_bytes: int) -> None:
        """Reserve heap for a peak of `peak_bytes`, and bind the threads that transfer messages to separate cores."""
        self._cores.apply()
        processes.reserve_heap(peak_bytes, self._world)
        self.throttle.settle()

    def counters(self) -> list[int]:
        """Return the bytes that this rank has sent and received; on a node's first rank, append those of the node."""
        own = _interface_counters("/proc/self/net/dev", "eth0")
        return own + (_interface_counters(self._node, "uplink") if self._node else [])

    def report(self, grown: list[int], steps: int) -> RankOnNetwork:
        """Return this rank's compute rate and bytes per step. `grown`: growth of the byte counters in `steps` steps."""
        sent, received, *node = (count / max(1, steps) for count in grown)
        return RankOnNetwork(
            compute_flops_per_s=self._rate,
            core_share=self.throttle.share,
            sent_bytes=sent,
            received_bytes=received,
            node_sent_bytes=node[0] if node else None,
            node_received_bytes=node[1] if node else None,
            facts=self._facts,
        )


def _interface_counters(file: str, interface: str) -> list[int]:
    for line in Path(file).read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            words = fields.split()
            return [int(words[8]), int(words[0])]
    raise OSError(f"{file} has no interface {interface}")


def _equal_rates(world: int, throttle: CoreThrottle) -> list[float]:
    """Return the compute rates (FLOP/s) of all ranks.  Raises `RuntimeError` if they differ too much."""
    for _ in range(MAX_RATE_ATTEMPTS):  # Other processes may disturb one measurement of the compute rates.
        rates = _compute_rates(world, throttle)
        apart = (max(rates) - min(rates)) * len(rates) / sum(rates)
        if apart <= MAX_RATE_SPREAD:
            return rates
    raise RuntimeError(
        f"the ranks' compute rates, {min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GFLOP/s, differ by "
        f"{apart:.0%} of their mean, above the limit of {MAX_RATE_SPREAD:.0%}: end other programs on this machine"
    )


def _compute_rates(world: int, throttle: CoreThrottle) -> list[float]:
    """Return the rate of matrix products on each rank in FLOP/s, measured while all ranks compute at the same time."""
    dist.barrier()
    began = time.perf_counter()
    done = compute_rate.count_flop(RATE_PROBE_S, time.perf_counter)
    throttle.settle()
    rate = done / (time.perf_counter() - began)
    rates = [torch.zeros(1, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(rates, torch.tensor([rate], dtype=torch.float64))
    return [float(one) for one in rates]


class CoreThrottle:
    """Limiter of the share of a processor core that a thread uses, by sleeps between `start` and `stop`."""

    def __init__(self, share: float):
        """`share`: fraction of each second in which the thread may compute, 0 to 1."""
        self.share = share
        self._delays = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._ahead = 0.0
        self._settling = self._waiting = False
        self._waits = [(kind, kind.wait) for kind in (dist.Work, transports.Work)]
        """Classes of asynchronous collectives with their original `wait` methods."""
        self._read_clocks()

    def start(self) -> None:
        """Start the throttle: the thread may sleep at ticks of a processor-time timer and before collective waits."""
        for kind, wait in self._waits:
            kind.wait = self._settled(wait)  # type: ignore[method-assign]
        signal.signal(signal.SIGVTALRM, self._tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, TIMER_INTERVAL_S, TIMER_INTERVAL_S)
        self._read_clocks()

    def stop(self) -> None:
        """End the limit on the thread's core share: stop the timer, and restore the `wait` methods of collectives."""
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
        for kind, wait in self._waits:
            kind.wait = wait  # type: ignore[method-assign]

    def settle(self) -> None:
        """Sleep while the computing time of this thread exceeds its share of the elapsed time."""
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
        self._read_clocks()
        self._settling = False

    def _settled(self, wait: Any) -> Any:
        owner = threading.get_ident()

        def settled(work: Any, *arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != owner or self._waiting:
                return wait(work, *arguments, **named)
            self.settle()
            self._waiting = True
            try:
                return wait(work, *arguments, **named)
            finally:
                self._waiting = False

        return settled

    def _read_clocks(self) -> None:
        self._delayed = self._delay()
        # Read the processor time last, so that reading the scheduling delay does not count as computation.
        self._computed = time.thread_time()

    def _delay(self) -> float:
        """Return the total seconds in which this thread was runnable but had no core."""
        return int(os.pread(self._delays, 64, 0).split()[1]) / 1e9

    def _tick(self, number: int, frame: FrameType | None) -> None:
        self.settle()
