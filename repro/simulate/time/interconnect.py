"""Sharing of network adapters and pod uplinks among all groups of one kind (such as tp), which communicate together.

A pod is a set of nodes with full bandwidth between them. Its uplink has the nodes' bandwidth divided by the
oversubscription, which flows out of the pod share equally (Llama 3: 3,072 devices and 1:7, 2407.21783v3 sec. 3.3.1).
Not modelled: collisions of flows on one of several links, and jobs that do not fill pods in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from math import log2
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from repro.config import Layout
from repro.parallel.ledger import RING_PASSES
from repro.simulate.placement import group_members
from repro.simulate.time.device import maximum, minimum

ALL_REDUCE, BROADCAST = "all_reduce", "broadcast"
TREE_EFFICIENCY = 0.9
"""Ratio of a tree's bandwidth to that of rings in NCCL (NVIDIA/nccl src/graph/tuning.cc)."""
Numbers = npt.NDArray[Any]


class Ring(NamedTuple):
    """Parameters of a process group's ring, which determine the time of collectives. Rates and times may be arrays."""

    ranks: int
    nodes: int
    rate: float
    """Bus bandwidth of the ring as NCCL defines it: bytes/s that pass each rank."""
    start: float
    """Start-up time before the first ring step, in seconds."""
    inside: float
    """Latency of a ring step between devices of one node, in seconds."""
    between: float
    """Latency of a ring step between nodes, in seconds."""
    half: float
    """Payload of a ring step, in bytes, with which the step reaches half of the ring's rate."""
    chunk: float
    """Time until a node in a tree has received a full chunk and forwards it, in seconds."""

    def seconds(
        self, op: str, payload: int, *, trees: bool = True, cores_s: Callable[[float], float] = lambda _: 0.0
    ) -> float:
        """Return the seconds of the collective `op` with `payload` bytes, by a ring or, if faster, by a tree.

        `trees`: whether the library has trees for all-reduces over several nodes. `cores_s`: minimum seconds of the
        CPU cores for a ring step in which every rank forwards the given bytes.
        """
        passes, n = RING_PASSES[op], self.ranks
        hops = (n - 1) * passes
        across = (self.nodes - 1) * passes
        sent = payload if op == BROADCAST else hops * payload / n
        ring = self.start + (hops - across) * self.inside + across * self.between
        ring += (sent + hops * self.half) / self.rate
        alone, busy = (sent / hops + self.half) / self.rate, cores_s(sent / hops)
        for steps, latency in ((hops - across, self.inside), (across, self.between)):
            if busy:
                ring += steps * maximum(0.0, busy - latency - alone)
        if op != ALL_REDUCE or self.nodes == 1 or not trees:
            return ring
        chunk = minimum(self.chunk, payload / self.rate)
        depth = (n / self.nodes - 1) * self.inside + log2(self.nodes) * (self.between + chunk)
        tree = self.start + 2 * depth + 2 * (payload + self.half) / (self.rate * TREE_EFFICIENCY)
        return minimum(ring, tree)


class GroupsOnNodes:
    """Process groups of equal size and their nodes, with one entry for each pair of a group and a node of the group."""

    def __init__(self, members: Numbers, nodes: Numbers):
        """`members`: ranks of each group, [groups, ranks per group]. `nodes`: node of each of these ranks."""
        self.members = members
        self._count = int(nodes.max()) + 1
        place = np.arange(len(members))[:, None] * self._count + nodes
        entries, of_member, self.ranks = np.unique(place.ravel(), return_inverse=True, return_counts=True)
        """Number of the group's ranks on the node, for each entry (a pair of a process group and a node)."""
        self.of_member = of_member.reshape(-1)
        """Index of each rank's entry (a pair of a process group and a node), in the order of flattened `members`."""
        self.group, self.node = np.divmod(entries, self._count)
        self.nodes = np.bincount(self.group)
        """Number of nodes on which each process group has ranks."""
        self._first = np.searchsorted(self.group, np.arange(len(members)))

    def members_of(self, entry: int) -> list[int]:
        """Return the ranks of one entry: those ranks of one process group that are on one node."""
        found: list[int] = self.members.ravel()[self.of_member == entry].tolist()
        return found

    def most(self, of_entries: Numbers) -> Numbers:
        """Return the maximum over the nodes of each process group. `of_entries`: values per pair (group, node)."""
        return np.maximum.reduceat(of_entries, self._first)

    def by_node(self, of_entries: Numbers) -> Numbers:
        """Return the sum over the process groups of each node. `of_entries`: values per pair (group, node)."""
        return np.bincount(self.node, weights=of_entries, minlength=self._count)


class NodeCounts(NamedTuple):
    """Integer properties of the network between nodes, which decide the adapters and uplinks that process groups share.

    Devices and adapters are divided among PCIe switches, and a device sends through adapters of its switch.
    """

    adapters: int = 1
    """Number of network adapters per node."""
    switch: int = 1
    """Number of devices per PCIe switch."""
    pod: int = 0
    """Number of nodes per pod; 0 if there is full bandwidth between all nodes."""


class AdapterShare(NamedTuple):
    """Network adapters of one node that a process group uses, and the group's share of their bandwidth."""

    adapters: int
    """Number of network adapters that the process group uses."""
    part: float
    """Bandwidth of the group, in adapters: sum over its adapters of 1 / (number of groups that use the adapter)."""


class PlacedRing(NamedTuple):
    """Placement of one or several process groups, while all groups of their kind (such as tp) communicate."""

    ranks: int
    """Number of ranks of the process group."""
    nodes: int
    """Number of nodes on which the process group has ranks."""
    inside: frozenset[tuple[int, int]]
    """For each node with several of the group's ranks: number of such groups on the node, sum of their ranks."""
    between: frozenset[AdapterShare]
    """Network adapters that the group uses in each of its nodes; empty for a group inside a node."""
    uplink_users: int
    """Largest number of process groups that share a pod's uplink with this group; 0 for a group inside a pod."""


class PlacedMessage(NamedTuple):
    """Placement of one or several messages between two pipeline stages, while all ranks of the stages communicate."""

    senders: int
    """Number of ranks of the sending stage on the sender's node."""
    share: AdapterShare | None
    """Network adapters that the sending rank uses; None if no message between the two stages leaves a node."""
    uplink_users: int
    """Largest number of messages that share an uplink with the message; 0 for a message inside a pod."""


@lru_cache(maxsize=4)
def placed_groups(layout: Layout, devices: int) -> PlacedGroups:
    """Return the cached placement of the process groups of `layout` on nodes with `devices` devices each."""
    return PlacedGroups(layout, devices)


class PlacedGroups:
    """Placement of the process groups of a layout on nodes, with the adapters and uplinks that groups share."""

    def __init__(self, layout: Layout, devices: int):
        """`devices`: number of devices per node."""
        self.layout, self.devices = layout, devices
        self.on_nodes, self.rings = cache(self._on_nodes), cache(self._rings)
        self.edge, self.messages = cache(self._edge), cache(self._messages)

    def neighbours(self, group: str) -> list[int]:
        """Return ranks of one process group on one node. The first group and node with several ranks are chosen."""
        on = self.on_nodes(group)
        assert on is not None
        return on.members_of(int((on.ranks > 1).argmax()))

    def _on_nodes(self, group: str) -> GroupsOnNodes | None:
        """Return all process groups of a kind (such as tp) with their ranks' nodes; None if groups have one member."""
        members = group_members(self.layout, group)
        return GroupsOnNodes(members, members // self.devices) if members.size else None

    def _edge(self, sender: int, receiver: int) -> GroupsOnNodes:
        """Return all pairs of a sending and a receiving rank of the stages with first ranks `sender` and `receiver`."""
        pairs = group_members(self.layout, "pp")[:, :1] + (sender, receiver)
        return GroupsOnNodes(pairs, pairs // self.devices)

    def _rings(self, group: str, counts: NodeCounts) -> frozenset[PlacedRing]:
        """Return the distinct placements of the process groups of the kind `group`, such as all tp groups."""
        on = self.on_nodes(group)
        if on is None:
            return frozenset()
        shared, across = on.ranks > 1, on.nodes[on.group] > 1
        rows = np.zeros((6, len(on.ranks)))
        rows[:2] = shared * (on.by_node(shared)[on.node], on.by_node(shared * on.ranks)[on.node])
        if across.any():
            rows[2:4] = across * self._adapter_shares(on, across, counts)
            pods = on.members // self.devices // counts.pod if counts.pod else np.zeros_like(on.members)
            rows[4] = _uplink_users(pods, pods.min(axis=1) != pods.max(axis=1))[on.group]
        rows[5] = on.nodes[on.group]
        entries, kinds = _distinct_rows(rows.T)
        has_entry = np.zeros((len(on.nodes), len(entries)), dtype=bool)
        has_entry[on.group, kinds] = True
        size = on.members.shape[1]
        return frozenset(_placed_ring(size, entries[chosen]) for chosen in _distinct_rows(has_entry)[0])

    def _messages(self, sender: int, receiver: int, counts: NodeCounts) -> frozenset[PlacedMessage]:
        """Return the distinct placements of messages between stages with first ranks `sender` and `receiver`."""
        edge = self.edge(sender, receiver)
        across = edge.nodes > 1
        leaves = bool(across.any())
        pairs = edge.members[across] if leaves else edge.members
        senders = GroupsOnNodes(pairs[:, :1], pairs[:, :1] // self.devices)
        rows = np.zeros((4, len(pairs)))
        rows[0] = senders.by_node(senders.ranks)[senders.node]
        if leaves:
            # A message uses all adapters near its sender. A ring uses a switch's adapters in proportion to its devices.
            rows[1:3] = self._adapter_shares(senders, across[across], counts._replace(switch=1))
            if counts.pod:
                pods = pairs // self.devices // counts.pod
                # A message uses two uplinks: the outgoing one of the sender's pod (even index) and the incoming one of
                # the receiver's pod (odd index).
                ways = 2 * pods + (0, 1)
                rows[3] = _uplink_users(ways, pods[:, 0] != pods[:, 1])
        return frozenset(
            PlacedMessage(int(ranks), AdapterShare(int(count), part) if leaves else None, int(users))
            for ranks, count, part, users in _distinct_rows(rows.T)[0].tolist()
        )

    def _adapter_shares(self, on: GroupsOnNodes, across: Numbers, counts: NodeCounts) -> Numbers:
        """Return number and bandwidth share of adapters for each group on each node, [2, pairs]; 0 inside a node."""
        reached: Numbers = self._reached(on, counts) & across[:, None]
        users = np.stack([on.by_node(column) for column in reached.T], axis=1)
        return np.stack([reached.sum(axis=1), (reached / np.maximum(users[on.node], 1)).sum(axis=1)])

    def _reached(self, on: GroupsOnNodes, counts: NodeCounts) -> Numbers:
        """Return whether each entry (process group on a node) uses each adapter of its node, [entries, adapters]."""
        count, switch = counts.adapters, counts.switch
        switches = -(-self.devices // switch)
        first = np.arange(switches) * count // switches
        end = np.maximum(first + 1, np.arange(1, switches + 1) * count // switches)
        place = on.of_member * switches + on.members.ravel() % self.devices // switch
        members = np.bincount(place, minlength=len(on.ranks) * switches).reshape(-1, switches)
        taken = first + np.minimum(-(-members * (end - first) // switch), end - first)
        adapter = np.arange(count)
        each = (first[:, None] <= adapter) & (adapter < taken[..., None])
        found: Numbers = np.logical_or.reduce(each, axis=1)
        return found


def _placed_ring(size: int, entries: Numbers) -> PlacedRing:
    """Return the placement of a process group of `size` ranks. `entries`: ranks, adapters and uplinks of its nodes."""
    groups, ranks, count, part, users, nodes = entries.T
    return PlacedRing(
        ranks=size,
        nodes=int(nodes[0]),
        inside=frozenset((int(g), int(r)) for g, r in zip(groups, ranks, strict=True) if g),
        between=frozenset(AdapterShare(int(c), float(p)) for c, p in zip(count, part, strict=True) if c),
        uplink_users=int(users[0]),
    )


def _uplink_users(ways: Numbers, leaving: Numbers) -> Numbers:
    """Return the largest number of flows that share an uplink with each flow; 0 for a flow that stays in its pod.

    `ways`: uplinks of each flow, [flows, uplinks per flow], with repetitions. `leaving`: whether a flow leaves its pod.
    """
    found = np.zeros(len(ways))
    if leaving.any():
        on = GroupsOnNodes(ways[leaving], ways[leaving])
        found[leaving] = on.most(np.bincount(on.node)[on.node])
    return found


def _distinct_rows(rows: Numbers) -> tuple[Numbers, Numbers]:
    """Return the few distinct rows of an array, and the index of each row among the distinct rows."""
    index, found = np.full(len(rows), -1), list[Numbers]()
    while (left := index < 0).any():
        row = rows[left.argmax()]
        index[(rows == row).all(axis=1)] = len(found)
        found.append(row)
    return np.array(found), index
