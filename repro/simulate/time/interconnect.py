"""Bandwidth of rings while all groups of an axis use the adapters of their nodes and the network above pods at once.

A network may narrow above pods of nodes. Inside a pod every node has its full bandwidth. The uplink of a pod has its
nodes' bandwidth divided by the oversubscription; Llama 3's cluster has pods of 3,072 devices and 1:7 above them
(2407.21783v3 sec. 3.3.1). Flows that leave a pod at the same time share its uplink equally. A ring passes its nodes in
the order of its ranks, so it leaves each pod once.

Not modelled: flows that meet on one link while others are free, jobs that do not fill pods in order, and latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from repro.parallel.ledger import RING_PASSES

ALL_REDUCE, BROADCAST = "all_reduce", "broadcast"
TREE_EFFICIENCY = 0.9
"""Bandwidth of a tree over that of the rings: NVIDIA/nccl src/graph/tuning.cc."""
Numbers = npt.NDArray[Any]
T = TypeVar("T")


class Ring(NamedTuple):
    """Parameters of a group's ring that determine the time of its collectives."""

    ranks: int
    nodes: int
    rate: float
    """Bytes/s that pass every rank, all rings together: the bus bandwidth of NCCL."""
    start: float
    """Start-up time in seconds, before the first step."""
    inside: float
    """Latency of a step within a node, in seconds."""
    between: float
    """Latency of a step between nodes, in seconds."""
    half: float
    """Payload of a step, in bytes, at which it reaches half of its rate."""
    chunk: float
    """Time for which a node holds a chunk of a tree's message before it passes the chunk on, in seconds."""

    def seconds(
        self, op: str, payload: int, *, trees: bool = True, cores_s: Callable[[float], float] = lambda _: 0.0
    ) -> float:
        """Return the seconds of `op`: the minimum of ring and tree if the library has `trees`, else those of the ring.

        `cores_s` gives the minimum time of the ranks' cores for a step in which every rank passes on that many bytes.
        """
        passes, n = RING_PASSES[op], self.ranks
        hops = (n - 1) * passes
        across = (self.nodes - 1) * passes
        sent = payload if op == BROADCAST else hops * payload / n
        ring = self.start + (hops - across) * self.inside + across * self.between
        ring += (sent + hops * self.half) / self.rate
        alone, busy = (sent / hops + self.half) / self.rate, cores_s(sent / hops)
        for steps, latency in ((hops - across, self.inside), (across, self.between)):
            ring += steps * max(0.0, busy - latency - alone)
        if op != ALL_REDUCE or self.nodes == 1 or not trees:
            return ring
        chunk = min(self.chunk, payload / self.rate)
        depth = (n / self.nodes - 1) * self.inside + log2(self.nodes) * (self.between + chunk)
        tree = self.start + 2 * depth + 2 * (payload + self.half) / (self.rate * TREE_EFFICIENCY)
        return min(ring, tree)


class GroupsOnNodes:
    """Groups of equal size on their nodes, as entries: one for each group and node with ranks of the group."""

    def __init__(self, members: Numbers, nodes: Numbers):
        """`members` are [groups, ranks of each], and `nodes` are the nodes of these ranks."""
        self.members = members
        self._count = int(nodes.max()) + 1
        place = np.arange(len(members))[:, None] * self._count + nodes
        entries, of_member, self.ranks = np.unique(place.ravel(), return_inverse=True, return_counts=True)
        """`ranks`: number of the group's ranks on the node, for each entry."""
        self.of_member = of_member.reshape(-1)
        """The entry of each member."""
        self.group, self.node = np.divmod(entries, self._count)
        self.nodes = np.bincount(self.group)
        """Number of nodes of each group."""
        self._first = np.searchsorted(self.group, np.arange(len(members)))
        self._known: dict[object, Any] = {}

    def once(self, key: object, find: Callable[[], T]) -> T:
        """Return the result of `find`, cached by `key`; it may depend only on the placement of groups and `key`."""
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found

    def members_of(self, entry: int) -> list[int]:
        """Return the ranks of one entry."""
        found: list[int] = self.members.ravel()[self.of_member == entry].tolist()
        return found

    def most(self, of_entries: Numbers) -> Numbers:
        """Return the largest value among each group's entries."""
        return np.maximum.reduceat(of_entries, self._first)

    def by_node(self, of_entries: Numbers) -> Numbers:
        """Return the sum of each node's entries."""
        return np.bincount(self.node, weights=of_entries, minlength=self._count)


@dataclass(frozen=True)
class Adapters:
    """The network adapters of each node, which groups use at the same time.

    Each device sends through the nearest adapter. Groups take several adapters behind one switch in the same order.
    """

    devices: int
    count: int
    each: float
    """Bytes/s of one adapter."""
    rings: int
    """Maximum number of adapters that a group uses."""
    switch: int = 1
    """Devices behind a switch."""

    def rates(self, on: GroupsOnNodes, across: Numbers) -> Numbers:
        """Return the bytes/s in and out of their nodes of the entries `across`, whose groups leave their nodes."""
        count, part = on.once((self.devices, self.count, self.switch), lambda: self._parts(on, across))
        whole: Numbers = np.minimum(np.minimum(self.rings, count), part) * self.each
        return whole[across]

    def _parts(self, on: GroupsOnNodes, across: Numbers) -> tuple[Numbers, Numbers]:
        """Return the number of adapters of each entry `across`, and the sum of its shares of these adapters."""
        reached: Numbers = self._reached(on) & across[:, None]
        users = np.stack([on.by_node(column) for column in reached.T], axis=1)
        return reached.sum(axis=1), (reached / np.maximum(users[on.node], 1)).sum(axis=1)

    def _reached(self, on: GroupsOnNodes) -> Numbers:
        """Return the adapters that each entry's group uses, as booleans [entries, adapters]."""
        switches = -(-self.devices // self.switch)
        first = np.arange(switches) * self.count // switches
        end = np.maximum(first + 1, np.arange(1, switches + 1) * self.count // switches)
        place = on.of_member * switches + on.members.ravel() % self.devices // self.switch
        members = np.bincount(place, minlength=len(on.ranks) * switches).reshape(-1, switches)
        taken = first + np.minimum(-(-members * (end - first) // self.switch), end - first)
        adapter = np.arange(self.count)
        each = (first[:, None] <= adapter) & (adapter < taken[..., None])
        found: Numbers = np.logical_or.reduce(each, axis=1)
        return found


@dataclass(frozen=True)
class Pods:
    """Pods of `nodes` nodes."""

    nodes: int
    way_out: float
    """Bytes/s out of a pod, and the same rate into it."""

    def rings(self, nodes: Numbers, rates: Numbers) -> Numbers:
        """Return the bytes/s of the rings of groups, all at the same time.

        `nodes` [groups, members] of their ranks; `rates` [groups] without pods.
        """
        pods = nodes // self.nodes
        return self._shared(pods, pods.min(axis=1) != pods.max(axis=1), rates)

    def messages(self, nodes: Numbers, rates: Numbers) -> Numbers:
        """Return the bytes/s of messages, all at the same time.

        `nodes` [messages, 2] of sender and receiver; `rates` [messages] without pods.
        """
        pods = nodes // self.nodes
        ways = 2 * pods + (0, 1)  # out of the sender's, into the receiver's
        return self._shared(ways, pods[:, 0] != pods[:, 1], rates)

    def _shared(self, ways: Numbers, leaving: Numbers, rates: Numbers) -> Numbers:
        """Return `rates`, with flows that are `leaving` limited to their share of the uplinks that they use."""
        if not leaving.any():
            return rates
        on = GroupsOnNodes(ways[leaving], ways[leaving])
        users = np.bincount(on.node)
        found = rates.copy()
        found[leaving] = np.minimum(rates[leaving], self.way_out / on.most(users[on.node]))
        return found
