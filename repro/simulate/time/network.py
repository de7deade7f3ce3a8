"""Seconds of a collective, and of a message between stages, on a system's links.

A large message goes round a ring of all ranks, which enters and leaves each node once and is as fast as its
slowest hop (the rings of NCCL, NVIDIA/nccl#412).  Between nodes a group drives the adapters near its own
devices, at most `rings` of them, and shares each with the other groups of its axis that do the same at the
same time.  A small all-reduce over several nodes takes a tree, whose latency grows with their logarithm.  Both
as NCCL estimates them itself, when it chooses (NVIDIA/nccl src/graph/tuning.cc, 2.5 on).

Not modelled: contention beyond a node's adapters (a fabric without oversubscription), groups of different axes
at the same time, NVLink that does not join every pair alike (DGX-1), protocols for small messages, and trees
over two nodes with few adapters, which reach up to twice the network's bandwidth (NVIDIA/nccl#307).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from math import log2
from typing import NamedTuple

from repro.config import Layout
from repro.config.links import Collective
from repro.config.system import System
from repro.parallel.ledger import RING_PASSES, SEND
from repro.simulate.placement import BETWEEN_NODES, GROUPS, Placement
from repro.simulate.time.measured_collectives import GroupSpan, interpolate, seconds

ALL_REDUCE, BROADCAST = "all_reduce", "broadcast"
TREE_EFFICIENCY = 0.9
"""What a tree reaches of the rings' bandwidth: NVIDIA/nccl src/graph/tuning.cc."""
PCIE = "pcie"


class Ring(NamedTuple):
    """What decides how long a group's collectives take."""

    ranks: int
    nodes: int
    rate: float
    """Bytes/s that pass every rank, all rings together: what NCCL calls bus bandwidth."""
    start: float
    """Seconds before the first step."""
    inside: float
    """Seconds of a step within a node."""
    between: float
    """Seconds of a step between nodes."""
    half: float
    """Payload of a step, in bytes, at which it is half as fast."""

    def seconds(self, op: str, payload: int) -> float:
        """Seconds of `op`; the faster of ring and tree."""
        passes, n = RING_PASSES[op], self.ranks
        hops = (n - 1) * passes
        across = (self.nodes - 1) * passes
        sent = payload if op == BROADCAST else hops * payload / n
        ring = self.start + (hops - across) * self.inside + across * self.between
        ring += (sent + hops * self.half) / self.rate
        if op != ALL_REDUCE or self.nodes == 1:
            return ring
        depth = (n / self.nodes - 1) * self.inside + log2(self.nodes) * self.between
        tree = self.start + 2 * depth + 2 * (payload + self.half) / (self.rate * TREE_EFFICIENCY)
        return min(ring, tree)


class Network:
    """The links of `system` as the groups of `layout` use them."""

    def __init__(self, system: System, layout: Layout):
        self.system, self.layout = system, layout
        self.placement = Placement(layout, system)
        self._link, self._rings = cache(self._link_of), cache(self._rings_of)
        self._spans = cache(self._spans_of)
        self._edge_link, self._edge_rate = cache(self._slowest_link), cache(self._slowest_rate)
        # A step asks for the same few collectives thousands of times.
        self._seconds, self._send_seconds = cache(self._seconds_of), cache(self._send_seconds_of)

    @cached_property
    def overlap_cost(self) -> float:
        """Fraction of a hidden collective's seconds that compute loses meanwhile, 0 to 1."""
        hidden = self.link("dp")  # nearly all that is hidden is data parallelism's
        links = [hidden] if hidden else self.system.links
        return max((self.number(link, "overlap_cost") for link in links), default=0.0)

    def seconds(self, op: str, group: str, payload: int) -> float:
        """Seconds of one collective, from when its slowest member has come to it.

        `op`: all_reduce, reduce_scatter, all_gather, broadcast.  `group`: world, tp, dp, pp, embedding.
        `payload`: bytes of the whole message, as `repro.parallel.ledger` counts it.  All groups of an
        axis do it at the same time, and the slowest one counts.  One rank takes no time.  `ConfigError` if
        the bandwidth is needed and unknown.
        """
        assert op in RING_PASSES, op
        assert group in GROUPS, group
        return self._seconds(op, group, payload)

    def _seconds_of(self, op: str, group: str, payload: int) -> float:
        if (measured := self._measured(op, self.link(group))) is not None:
            assert self.system.provenance is not None
            count = self.system.provenance.ranks
            found = (seconds(measured, count, span, payload) for span in self._spans(group))
            return max(found, default=0.0)
        return max((ring.seconds(op, payload) for ring in self._rings(group)), default=0.0)

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Seconds of `payload` bytes from each rank of a stage to its peer, all of them at the same time."""
        return self._send_seconds(payload, from_stage, to_stage) if from_stage != to_stage else 0.0

    def _send_seconds_of(self, payload: int, from_stage: int, to_stage: int) -> float:
        link = self._edge_link(from_stage, to_stage)
        measured = self._measured(SEND, link)
        if measured is not None:
            return interpolate(measured, payload)
        return self.number(link, "latency_s") + payload / self._edge_rate(from_stage, to_stage)

    def link(self, group: str) -> str:
        """The slowest class of links that any group of this axis needs; empty for one rank."""
        return self._link(group)

    def bus_bandwidth(self, group: str) -> float:
        """Bytes/s of the slowest group of this axis, as nccl-tests count it, for messages without end."""
        return min((ring.rate for ring in self._rings(group)), default=float("inf"))

    def number(self, link: str, key: str) -> float:
        """A number of a class of links, known or assumed."""
        return self.system.links[link].used(link, key).known(f"links.{link}.{key}", system=self.system.name)

    def peak(self, link: str) -> float:
        """Bytes/s of a device (`per = "device"`) or of a node that collectives reach on this link."""
        bandwidth = self.system.links[link].bandwidth
        return bandwidth.known(f"links.{link}.bandwidth", system=self.system.name) * self.number(
            link, "efficiency"
        )

    def _measured(self, op: str, link: str) -> Collective | None:
        """What was measured of `op`, if it was."""
        known = self.system.links.get(link)
        return known.collectives.get(op) if known is not None else None

    def _spans_of(self, group: str) -> frozenset[GroupSpan]:
        """The different kinds of groups of an axis."""
        found = set()
        for ranks in self._groups(group):
            most = max(map(len, self.placement.by_node(ranks).values()))
            found.add(GroupSpan(len(ranks), most, ranks[1] - ranks[0]))
        return frozenset(found)

    def _groups(self, group: str) -> Iterator[tuple[int, ...]]:
        """Every group of the axis that has more than one member."""
        if group == "world":
            if self.layout.world > 1:
                yield self.placement.ranks_of(group, 0)
            return
        for rank in range(self.layout.world) if group == "embedding" else self._starts(group):
            ranks = self.placement.ranks_of(group, rank)
            if len(ranks) > 1 and ranks[0] == rank:
                yield ranks

    def _starts(self, axis: str) -> list[int]:
        """The first rank of every group of an axis of the layout."""
        stride, degree = self.layout.strides[axis], getattr(self.layout, axis)
        return [rank for rank in range(self.layout.world) if rank // stride % degree == 0]

    def _link_of(self, group: str) -> str:
        found = {self.placement.link_of(group, ranks) for ranks in self._groups(group)}
        return BETWEEN_NODES if BETWEEN_NODES in found else next(iter(found), "")

    def _rings_of(self, group: str) -> tuple[Ring, ...]:
        """The different rings among the groups of an axis."""
        groups = [self.placement.by_node(ranks) for ranks in self._groups(group)]
        across = [by_node for by_node in groups if len(by_node) > 1]
        adapters = Adapters(self, across)
        inside = Counter(node for by_node in groups for node, ranks in by_node.items() if len(ranks) > 1)
        ranks_inside = Counter[int]()
        for by_node in groups:
            for node, ranks in by_node.items():
                ranks_inside[node] += len(ranks) if len(ranks) > 1 else 0
        found = set()
        for by_node in groups:
            shared = [node for node, ranks in by_node.items() if len(ranks) > 1]
            rates, start, half, within, between = [], 0.0, 0.0, 0.0, 0.0
            if shared:
                link = self.placement.link_of(group, by_node[shared[0]])
                rates += [self._rate_inside(link, inside[node], ranks_inside[node]) for node in shared]
                within = self.number(link, "latency_s")
                start, half = self.number(link, "start_s"), self.number(link, "half_bytes")
            if len(by_node) > 1:
                rates += [adapters.rate(node, ranks) for node, ranks in by_node.items()]
                between = self.number(BETWEEN_NODES, "latency_s")
                start = max(start, self.number(BETWEEN_NODES, "start_s"))
                half = max(half, self.number(BETWEEN_NODES, "half_bytes"))
            size = sum(len(ranks) for ranks in by_node.values())
            found.add(Ring(size, len(by_node), min(rates), start, within, between, half))
        return tuple(found)

    def _rate_inside(self, link: str, groups: int, ranks: int) -> float:
        """Bytes/s of a ring in a node in which `ranks` devices form `groups` rings at the same time."""
        if self.system.links[link].per == "node":
            return self.peak(link) / ranks
        # Without NVLink all rings of a node go through the same host bridges and the link of its sockets.
        return self.peak(link) / groups if link == PCIE else self.peak(link)

    def _edge(self, from_stage: int, to_stage: int) -> dict[tuple[int, int], str]:
        """Who sends to whom from one stage to another, and over which class of links."""
        stride = self.layout.strides["pp"]
        pairs = [(first + from_stage * stride, first + to_stage * stride) for first in self._starts("pp")]
        return {pair: self.placement.link_of("pp", pair) for pair in pairs}

    def _slowest_link(self, from_stage: int, to_stage: int) -> str:
        links = set(self._edge(from_stage, to_stage).values())
        return BETWEEN_NODES if BETWEEN_NODES in links else next(iter(links))

    def _slowest_rate(self, from_stage: int, to_stage: int) -> float:
        """Bytes/s of a rank of one stage that sends to another, if all ranks of the stage do."""
        edge, node_of = self._edge(from_stage, to_stage), self.placement.node_of
        across = [rank for (rank, _), link in edge.items() if link == BETWEEN_NODES]
        if across:
            adapters = Adapters(self, [{node_of(rank): (rank,)} for rank in across])
            return min(adapters.rate(node_of(rank), (rank,)) for rank in across)
        senders = max(Counter(node_of(rank) for rank, _ in edge).values())
        return self._rate_inside(next(iter(edge.values())), senders, senders)


class Adapters:
    """Network adapters that groups use at the same time: each device sends through the nearest."""

    def __init__(self, network: Network, groups: Sequence[dict[int, tuple[int, ...]]]):
        """`groups`: ranks by node, of every group that leaves its nodes."""
        if not groups:
            return
        system = network.system
        link = system.links.get(BETWEEN_NODES)
        if link is None:
            system.link_per_device(BETWEEN_NODES)  # raises ConfigError and says which links there are
        assert link is not None
        self.devices = int(system.devices_per_node.known("devices_per_node", system=system.name))
        self.count = self.devices if link.per == "device" else int(network.number(BETWEEN_NODES, "adapters"))
        self.rings = int(network.number(BETWEEN_NODES, "rings"))
        peak = network.peak(BETWEEN_NODES)
        self.each = peak if link.per == "device" else peak / self.count
        self.users = Counter(
            (node, adapter)
            for by_node in groups
            for node, ranks in by_node.items()
            for adapter in self._near(ranks)
        )

    def rate(self, node: int, ranks: Sequence[int]) -> float:
        """Bytes/s in and out of `node` for a group that has `ranks` there."""
        near = self._near(ranks)
        fair = sum(self.each / self.users[node, adapter] for adapter in near)
        return min(min(self.rings, len(near)) * self.each, fair)

    def _near(self, ranks: Sequence[int]) -> set[int]:
        found = set[int]()
        for rank in ranks:
            device = rank % self.devices
            first, end = (index * self.count // self.devices for index in (device, device + 1))
            found.update(range(first, max(end, first + 1)))
        return found
