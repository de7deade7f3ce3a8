"""A rank on an emulated network: how fast it computes beside the others, and what goes over its links."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from repro.config import EmulatedNetwork
from repro.config.network import core_share
from repro.emulate import compute_rate
from repro.launch.job import NETWORK_FILE, Job
from repro.launch.rank.throttle import Throttle
from repro.results.record_parts import RankOnNetwork
from repro.util import processes
from repro.util.processes import CoreAssignment, count_compute_cores

RATE_PROBE_S = 0.6
MAX_RATE_ATTEMPTS = 15
MAX_RATE_SPREAD = 0.25
"""Ranks that compute at rates further apart than this fraction of their mean are no equal devices."""


class EmulatedNetworkRank:
    """What one rank sees of its network, from joining the others to its result."""

    def __init__(self, network: EmulatedNetwork, facts: Path, rank: int):
        """Measure the compute rates of all ranks together.  Raises `RuntimeError` if they are too far apart."""
        self._world = network.world
        found = json.loads(facts.read_text(encoding="utf-8"))
        self._facts = found if rank == 0 else None
        self._node = ""
        if rank % network.ranks_per_node == 0 and network.nodes > 1:
            self._node = f"/proc/{found['nodes'][network.node_of(rank)]}/net/dev"
        processes.keep_freed_memory()
        self._cores = CoreAssignment(rank)
        self._cores.apply()
        self.throttle = Throttle(core_share(network.world, count_compute_cores(found["cores"])))
        self.throttle.start()
        try:
            self._rate = _equal_rates(network.world, self.throttle)[rank]
        except BaseException:
            self.throttle.stop()  # a timer that goes on would kill the rank at its end, and what it has to say with it
            raise

    @staticmethod
    @contextmanager
    def of(job: Job, rank: int) -> Iterator[EmulatedNetworkRank | None]:
        """While it is open, this rank is held to its share of a core; None for a job on the machine's own network."""
        if job.network is None:
            yield None
            return
        seen = EmulatedNetworkRank(job.network, Path(job.folder) / NETWORK_FILE, rank)
        try:
            yield seen
        finally:
            seen.throttle.stop()

    def timed(self, peak_bytes: int) -> None:
        """Timed steps begin, which hold `peak_bytes`.  Threads that carry messages are there by now, and go where
        these are carried."""
        self._cores.apply()
        processes.reserve_heap(peak_bytes, self._world)
        self.throttle.settle()

    def counters(self) -> list[int]:
        """Bytes sent and received by this rank, then by its node where this rank speaks for it."""
        own = _counters("/proc/self/net/dev", "eth0")
        return own + (_counters(self._node, "uplink") if self._node else [])

    def report(self, grown: list[int], steps: int) -> RankOnNetwork:
        """`grown`: what the counters have grown by in so many steps."""
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


def _counters(file: str, interface: str) -> list[int]:
    for line in Path(file).read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            words = fields.split()
            return [int(words[8]), int(words[0])]
    raise OSError(f"{file} has no interface {interface}")


def _equal_rates(world: int, throttle: Throttle) -> list[float]:
    """The compute rates of all ranks.  Raises `RuntimeError` if they are too far apart."""
    for _ in range(MAX_RATE_ATTEMPTS):  # what else runs here may disturb one of them
        rates = _compute_rates(world, throttle)
        apart = (max(rates) - min(rates)) * len(rates) / sum(rates)
        if apart <= MAX_RATE_SPREAD:
            return rates
    raise RuntimeError(
        f"the ranks' compute rates, {min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GFLOP/s, are "
        f"{apart:.0%} of their mean apart and not {MAX_RATE_SPREAD:.0%} at most: something else computes here"
    )


def _compute_rates(world: int, throttle: Throttle) -> list[float]:
    """FLOP/s of matrix products on every rank, all at once."""
    dist.barrier()
    began = time.perf_counter()
    done = compute_rate.count_flop(RATE_PROBE_S, time.perf_counter)
    throttle.settle()
    rate = done / (time.perf_counter() - began)
    rates = [torch.zeros(1, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(rates, torch.tensor([rate], dtype=torch.float64))
    return [float(one) for one in rates]
