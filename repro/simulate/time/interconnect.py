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
"""What a tree reaches of the rings' bandwidth: NVIDIA/nccl src/graph/tuning.cc."""
Numbers = npt.NDArray[Any]
T = TypeVar("T")


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
    chunk: float
    """Seconds that a node has a chunk of a tree's message before it passes it on."""

    def seconds(
        self, op: str, payload: int, *, trees: bool = True, cores_s: Callable[[float], float] = lambda _: 0.0
    ) -> float:
        """Seconds of `op`; the faster of ring and tree, where the library has `trees`.

        `cores_s`: what the ranks' cores need for a step in which every rank passes on so many bytes, at least.
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
    """Groups of equal size on their nodes, as entries: one for every group and node on which it has ranks."""

    def __init__(self, members: Numbers, nodes: Numbers):
        """`members` [groups, ranks of each], and the node of every one."""
        self.members = members
        self._count = int(nodes.max()) + 1
        place = np.arange(len(members))[:, None] * self._count + nodes
        entries, of_member, self.ranks = np.unique(place.ravel(), return_inverse=True, return_counts=True)
        """`ranks`: how many of an entry's group are on its node."""
        self.of_member = of_member.reshape(-1)
        """The entry of each member."""
        self.group, self.node = np.divmod(entries, self._count)
        self.nodes = np.bincount(self.group)
        """Of each group."""
        self._first = np.searchsorted(self.group, np.arange(len(members)))
        self._known: dict[object, Any] = {}

    def once(self, key: object, find: Callable[[], T]) -> T:
        """What `find` says, found once: of where the groups lie and of `key` alone."""
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found

    def members_of(self, entry: int) -> list[int]:
        """The ranks of one entry."""
        found: list[int] = self.members.ravel()[self.of_member == entry].tolist()
        return found

    def most(self, of_entries: Numbers) -> Numbers:
        """The largest of each group's entries."""
        return np.maximum.reduceat(of_entries, self._first)

    def by_node(self, of_entries: Numbers) -> Numbers:
        """The sum of each node's entries."""
        return np.bincount(self.node, weights=of_entries, minlength=self._count)


@dataclass(frozen=True)
class Adapters:
    """The network adapters of each node, which groups use at the same time.

    Each device sends through the nearest; behind a switch with several, groups take them in the same order.
    """

    devices: int
    count: int
    each: float
    """Bytes/s of one."""
    rings: int
    """A group drives so many at most."""
    switch: int = 1
    """Devices behind a switch."""

    def rates(self, on: GroupsOnNodes, across: Numbers) -> Numbers:
        """Bytes/s in and out of their nodes of the entries that are `across`: of groups that leave their nodes."""
        count, part = on.once((self.devices, self.count, self.switch), lambda: self._parts(on, across))
        whole: Numbers = np.minimum(np.minimum(self.rings, count), part) * self.each
        return whole[across]

    def _parts(self, on: GroupsOnNodes, across: Numbers) -> tuple[Numbers, Numbers]:
        """Of each entry that is `across`, how many adapters it takes, and how many it is left by the others."""
        reached: Numbers = self._reached(on) & across[:, None]
        users = np.stack([on.by_node(column) for column in reached.T], axis=1)
        return reached.sum(axis=1), (reached / np.maximum(users[on.node], 1)).sum(axis=1)

    def _reached(self, on: GroupsOnNodes) -> Numbers:
        """Which adapters each entry's group takes [entries, adapters]."""
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
    """Bytes/s out of a pod, and as many into it."""

    def rings(self, nodes: Numbers, rates: Numbers) -> Numbers:
        """Bytes/s of the rings of groups, all at the same time.

        `nodes` [groups, members] of their ranks; `rates` [groups] if nothing narrowed.
        """
        pods = nodes // self.nodes
        return self._shared(pods, pods.min(axis=1) != pods.max(axis=1), rates)

    def messages(self, nodes: Numbers, rates: Numbers) -> Numbers:
        """Bytes/s of messages, all at the same time.

        `nodes` [messages, 2] of sender and receiver; `rates` [messages] if nothing narrowed.
        """
        pods = nodes // self.nodes
        ways = 2 * pods + (0, 1)  # out of the sender's, into the receiver's
        return self._shared(ways, pods[:, 0] != pods[:, 1], rates)

    def _shared(self, ways: Numbers, leaving: Numbers, rates: Numbers) -> Numbers:
        """`rates`, and of what is `leaving` no more than its part of the ways that it takes."""
        if not leaving.any():
            return rates
        on = GroupsOnNodes(ways[leaving], ways[leaving])
        users = np.bincount(on.node)
        found = rates.copy()
        found[leaving] = np.minimum(rates[leaving], self.way_out / on.most(users[on.node]))
        return found
