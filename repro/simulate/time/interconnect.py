"""Bandwidth of rings while all groups of an axis use the adapters of their nodes and the network above pods at once.

A network may narrow above pods of nodes. Inside a pod every node has its full bandwidth. The uplink of a pod has its
nodes' bandwidth divided by the oversubscription; Llama 3's cluster has pods of 3,072 devices and 1:7 above them
(2407.21783v3 sec. 3.3.1). Flows that leave a pod at the same time share its uplink equally. A ring passes its nodes in
the order of its ranks, so it leaves each pod once.

Not modelled: flows that meet on one link while others are free, jobs that do not fill pods in order, and latency."""

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
"""Bandwidth of a tree over that of the rings: NVIDIA/nccl src/graph/tuning.cc."""
Numbers = npt.NDArray[Any]


class Ring(NamedTuple):
    """Parameters of a group's ring that determine the time of its collectives; rates and times may be arrays."""

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
            if busy:
                ring += steps * maximum(0.0, busy - latency - alone)
        if op != ALL_REDUCE or self.nodes == 1 or not trees:
            return ring
        chunk = minimum(self.chunk, payload / self.rate)
        depth = (n / self.nodes - 1) * self.inside + log2(self.nodes) * (self.between + chunk)
        tree = self.start + 2 * depth + 2 * (payload + self.half) / (self.rate * TREE_EFFICIENCY)
        return minimum(ring, tree)


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


class NodeCounts(NamedTuple):
    """Whole numbers of a network between nodes, which decide the adapters and uplinks that groups share.

    Each device sends through the nearest adapter. Groups take several adapters behind one switch in the same order.
    """

    adapters: int = 1
    """Network adapters of a node."""
    switch: int = 1
    """Devices behind a switch."""
    pod: int = 0
    """Nodes of a pod; 0 if the network does not narrow above pods."""


class AdapterShare(NamedTuple):
    """Adapters that a group uses in a node which it leaves."""

    adapters: int
    """Number of these adapters."""
    part: float
    """Sum of the group's shares of these adapters."""


class PlacedRing(NamedTuple):
    """Placement of one or more groups of an axis on nodes, while all groups of the axis communicate."""

    ranks: int
    """Number of ranks of a group."""
    nodes: int
    """Number of nodes of a group."""
    inside: frozenset[tuple[int, int]]
    """Number of groups and of ranks in a node, for each node with two or more ranks of a group."""
    between: frozenset[AdapterShare]
    """Adapters of a group in each of its nodes; empty for a group inside a node."""
    uplink_users: int
    """Largest number of groups that share an uplink of a group's pods; 0 for a group inside a pod."""


class PlacedMessage(NamedTuple):
    """Placement of one or more messages between two stages, while all ranks of the stages communicate."""

    senders: int
    """Number of senders in the sender's node."""
    share: AdapterShare | None
    """Adapters of the sender; None if no message between the two stages leaves its node."""
    uplink_users: int
    """Largest number of messages that share an uplink; 0 for a message inside a pod."""


@lru_cache(maxsize=4)
def placed_groups(layout: Layout, devices: int) -> PlacedGroups:
    """Return the groups of `layout` on nodes of `devices` devices; the networks of an experiment share them."""
    return PlacedGroups(layout, devices)


class PlacedGroups:
    """Groups of a layout on nodes: the ranks, shared adapters and uplinks of each group."""

    def __init__(self, layout: Layout, devices: int):
        """`devices`: number of devices per node."""
        self.layout, self.devices = layout, devices
        self.on_nodes, self.rings = cache(self._on_nodes), cache(self._rings)
        self.edge, self.messages = cache(self._edge), cache(self._messages)

    def neighbours(self, group: str) -> list[int]:
        """Return the ranks of a group on a node that has several of them."""
        on = self.on_nodes(group)
        assert on is not None
        return on.members_of(int((on.ranks > 1).argmax()))

    def _on_nodes(self, group: str) -> GroupsOnNodes | None:
        """Return every group of the axis with more than one member; None if there is none."""
        members = group_members(self.layout, group)
        return GroupsOnNodes(members, members // self.devices) if members.size else None

    def _edge(self, sender: int, receiver: int) -> GroupsOnNodes:
        """Return all pairs of a rank of one stage and a rank of another, whose first ranks are these."""
        pairs = group_members(self.layout, "pp")[:, :1] + (sender, receiver)
        return GroupsOnNodes(pairs, pairs // self.devices)

    def _rings(self, group: str, counts: NodeCounts) -> frozenset[PlacedRing]:
        """Return the distinct placements of the groups of an axis; `counts` matter only between nodes."""
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
        """Return the distinct placements of the messages from one stage to another, whose first ranks are these."""
        edge = self.edge(sender, receiver)
        across = edge.nodes > 1
        leaves = bool(across.any())
        pairs = edge.members[across] if leaves else edge.members
        senders = GroupsOnNodes(pairs[:, :1], pairs[:, :1] // self.devices)
        rows = np.zeros((4, len(pairs)))
        rows[0] = senders.by_node(senders.ranks)[senders.node]
        if leaves:
            # A message uses all adapters near its device in turn, but a ring uses those of its communicator.
            rows[1:3] = self._adapter_shares(senders, across[across], counts._replace(switch=1))
            if counts.pod:
                pods = pairs // self.devices // counts.pod
                ways = 2 * pods + (0, 1)  # out of the sender's, into the receiver's
                rows[3] = _uplink_users(ways, pods[:, 0] != pods[:, 1])
        return frozenset(
            PlacedMessage(int(ranks), AdapterShare(int(count), part) if leaves else None, int(users))
            for ranks, count, part, users in _distinct_rows(rows.T)[0].tolist()
        )

    def _adapter_shares(self, on: GroupsOnNodes, across: Numbers, counts: NodeCounts) -> Numbers:
        """Return `AdapterShare` of the entries `across`, whose groups leave their nodes, [2, entries]."""
        reached: Numbers = self._reached(on, counts) & across[:, None]
        users = np.stack([on.by_node(column) for column in reached.T], axis=1)
        return np.stack([reached.sum(axis=1), (reached / np.maximum(users[on.node], 1)).sum(axis=1)])

    def _reached(self, on: GroupsOnNodes, counts: NodeCounts) -> Numbers:
        """Return the adapters that each entry's group uses, as booleans [entries, adapters]."""
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
    """Return the placement of a group of `size` ranks with these entries: the rows of `PlacedGroups._rings`."""
    groups, ranks, count, part, users, nodes = entries.T
    return PlacedRing(
        ranks=size,
        nodes=int(nodes[0]),
        inside=frozenset((int(g), int(r)) for g, r in zip(groups, ranks, strict=True) if g),
        between=frozenset(AdapterShare(int(c), float(p)) for c, p in zip(count, part, strict=True) if c),
        uplink_users=int(users[0]),
    )


def _uplink_users(ways: Numbers, leaving: Numbers) -> Numbers:
    """Return the largest number of flows that share an uplink of each flow, [flows]; 0 unless it is `leaving`.

    `ways`: uplinks of each flow, [flows, any]. A flow may use one uplink more than once.
    """
    found = np.zeros(len(ways))
    if leaving.any():
        on = GroupsOnNodes(ways[leaving], ways[leaving])
        found[leaving] = on.most(np.bincount(on.node)[on.node])
    return found


def _distinct_rows(rows: Numbers) -> tuple[Numbers, Numbers]:
    """Return the distinct rows, of which there are few, and the index of each row among them."""
    index, found = np.full(len(rows), -1), list[Numbers]()
    while (left := index < 0).any():
        row = rows[left.argmax()]
        index[(rows == row).all(axis=1)] = len(found)
        found.append(row)
    return np.array(found), index
