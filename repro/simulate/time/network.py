"""Seconds of a collective, and of a message between stages, on a system's links.

A large message passes a ring of all ranks (the rings of NCCL, NVIDIA/nccl#412). The ring enters and leaves each node
once and is as fast as its slowest hop. Between nodes a group uses the adapters near its own devices, at most `rings` of
them, and shares each with the other groups of its axis. A small all-reduce over several nodes takes a tree. Its latency
grows with the logarithm of the nodes and includes each node's wait for full chunks. Both formulas are those of NCCL
(NVIDIA/nccl src/graph/tuning.cc, 2.5 on). `repro.simulate.time.interconnect` shares adapters and uplinks. If `repro
calibrate` measured a collective, the model interpolates its seconds between payloads and group sizes.

Not modelled: groups of different axes at the same time, pairs of devices with unequal NVLink (DGX-1), protocols for
small messages, and trees over two nodes with few adapters. Such trees reach up to twice the network's bandwidth
(NVIDIA/nccl#307).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from math import log2
from typing import NamedTuple, cast

import numpy as np

from repro.config import Layout
from repro.config.links import Collective
from repro.config.system import System
from repro.parallel.ledger import RING_PASSES, SEND, messages_of
from repro.simulate.placement import BETWEEN_NODES, GROUPS, Placement
from repro.simulate.time.interconnect import ALL_REDUCE, Adapters, GroupsOnNodes, Numbers, Pods, Ring


class GroupSpan(NamedTuple):
    """Placement of a group's members on the ranks."""

    ranks: int
    per_node: int
    """Largest number of members on one node."""
    stride: int
    """Distance in ranks between consecutive members."""


def measured_seconds(measured: Collective, all_ranks: int, span: GroupSpan, payload: float) -> float:
    """Return the seconds of `payload` bytes in groups like `span`; the file was measured with `all_ranks` ranks."""
    known = nearest_measurement(measured, all_ranks, span)
    return scale_to_ranks(known, known.ranks or all_ranks, span.ranks, payload)


def nearest_measurement(measured: Collective, all_ranks: int, span: GroupSpan) -> Collective:
    """Return the measured groups that are most similar to `span` in members, members on a node, then stride."""

    def distance(known: Collective) -> tuple[float, float]:
        ranks = known.ranks or all_ranks
        size, shared = log2(ranks / span.ranks), log2((known.per_node or ranks) / span.per_node)
        return abs(size) + abs(shared), abs(log2(known.stride / span.stride))

    return min((measured, *measured.groups), key=distance)


def scale_to_ranks(measured: Collective, whole: int, ranks: int, payload: float) -> float:
    """Return the seconds for `ranks` ranks, scaled from a measurement with `whole` ranks.

    A ring has ranks - 1 steps (or twice as many) of payload / ranks bytes.
    """
    if whole < 2 or ranks == whole:
        return interpolate(measured, payload)
    return interpolate(measured, payload * whole / ranks) * (ranks - 1) / (whole - 1)


def interpolate(measured: Collective, payload: float) -> float:
    """Return the seconds of `payload` bytes, interpolated between measured points.

    A point that is faster than a smaller one is noise and gets the time of the smaller one. Time does not fall below
    that of the first point. Bandwidth does not rise above that of the last point.
    """
    sizes = [size for size, _ in measured.points]
    times = list(accumulate((seconds for _, seconds in measured.points), max))
    if payload >= sizes[-1]:
        return times[-1] * payload / sizes[-1]
    at = bisect_left(sizes, payload)
    if at == 0:
        return times[0]
    part = (payload - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return times[at - 1] + part * (times[at] - times[at - 1])


PCIE = "pcie"


class Network:
    """The links of `system` as the groups of `layout` use them."""

    def __init__(self, system: System, layout: Layout, like: Network | None = None):
        """`like`: a network with the same layout and devices per node, whose placement of groups is reused."""
        self.system, self.layout = system, layout
        self.placement = Placement(layout, system)
        self._link, self._rings = cache(self._link_of), cache(self._rings_of)
        self._spans = cache(self._spans_of)
        self._on_nodes, self._edge = cache(self._on_nodes_of), cache(self._edge_of)
        if like is not None:
            self._on_nodes, self._edge = like._on_nodes, like._edge
        self._edge_link, self._edge_rate = cache(self._slowest_link), cache(self._slowest_rate)
        # A step repeats the same few collectives thousands of times.
        self._seconds, self._send_seconds = cache(self._seconds_of), cache(self._send_seconds_of)

    @cached_property
    def overlap_cost(self) -> float:
        """Fraction of a hidden collective's seconds that concurrent compute loses, 0 to 1."""
        hidden = self.link("dp")  # nearly all hidden collectives are those of data parallelism
        links = [hidden] if hidden else self.system.links
        return max((self.number(link, "overlap_cost") for link in links), default=0.0)

    def seconds(self, op: str, group: str, payload: int) -> float:
        """Return the seconds of one collective, from the time at which its slowest member reaches it.

        `op`: all_reduce, reduce_scatter, all_gather, broadcast. `group`: world, tp, cp, dp, pp, embedding. `payload`:
        bytes of the full message, as `repro.parallel.ledger` counts it. All groups of an axis communicate at the same
        time, and the slowest one counts. One rank takes no time. `ConfigError` if the bandwidth is needed and unknown.
        """
        assert op in RING_PASSES, op
        assert group in GROUPS, group
        return self._seconds(op, group, payload)

    def _seconds_of(self, op: str, group: str, payload: int) -> float:
        if (measured := self._measured(op, self.link(group))) is not None:
            assert self.system.provenance is not None
            count = self.system.provenance.ranks
            found = (measured_seconds(measured, count, span, payload) for span in self._spans(group))
            return max(found, default=0.0)
        trees = "memory" not in self.system.links  # processor cores have gloo, and gloo has rings alone
        rings = (ring.seconds(op, payload, trees=trees, cores_s=self._cores_s) for ring in self._rings(group))
        return max(rings, default=0.0)

    def _cores_s(self, payload: float) -> float:
        """Return the cores' seconds for a step of all rings of an axis, in which every rank has one."""
        needs = [
            interpolate(link.hop, payload) for link in self.system.links.values() if link.hop is not None
        ]
        return max(needs, default=0.0)

    def messages(self, op: str, group: str) -> int:
        """Return the number of messages that a rank's thread begins and awaits in a collective of gloo.

        The number is 1 for groups with a ring of nodes, in which another thread does this (`repro.parallel.gloo_ring`).
        """
        on = self._on_nodes(group)
        if on is None or ((on.nodes > 1) & (on.most(on.ranks) > 1)).all():
            return 1
        return messages_of(op, on.members.shape[1])

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Return the seconds of `payload` bytes from each rank of a stage to its peer, all at the same time."""
        return self._send_seconds(payload, from_stage, to_stage) if from_stage != to_stage else 0.0

    def _send_seconds_of(self, payload: int, from_stage: int, to_stage: int) -> float:
        link = self._edge_link(from_stage, to_stage)
        measured = self._measured(SEND, link)
        if measured is not None:
            return interpolate(measured, payload)
        return self.number(link, "latency_s") + payload / self._edge_rate(from_stage, to_stage)

    def link(self, group: str) -> str:
        """Return the slowest class of links that any group of this axis needs; empty for one rank."""
        return self._link(group)

    def bus_bandwidth(self, group: str) -> float:
        """Return the bytes/s of the slowest group of this axis, as in nccl-tests, in the limit of large messages."""
        return min((ring.rate for ring in self._rings(group)), default=float("inf"))

    def least_seconds(self, op: str, group: str, payload: float, count: int) -> float:
        """Return a lower bound of the seconds of `count` collectives with together `payload` bytes.

        A ring takes the same time for each collective and for each byte. Where all-reduces may take a tree, bytes alone
        count, since a tree is faster for small messages only.
        """
        rings = self._rings(group)
        if op == ALL_REDUCE:
            return max(
                (RING_PASSES[op] * (r.ranks - 1) / r.ranks * payload / r.rate for r in rings), default=0.0
            )
        each = (
            (count - 1) * ring.seconds(op, 0, trees=False) + ring.seconds(op, int(payload), trees=False)
            for ring in rings
        )
        return max(each, default=0.0)

    def number(self, link: str, key: str) -> float:
        """Return a number of a class of links, known or assumed."""
        return self.system.links[link].used(link, key).known(f"links.{link}.{key}", system=self.system.name)

    def peak(self, link: str) -> float:
        """Return the bytes/s of a device (`per = "device"`) or of a node that collectives reach on this link."""
        bandwidth = self.system.links[link].bandwidth
        return bandwidth.known(f"links.{link}.bandwidth", system=self.system.name) * self.number(
            link, "efficiency"
        )

    def _measured(self, op: str, link: str) -> Collective | None:
        """Return the measurement of `op` on `link`, or None."""
        known = self.system.links.get(link)
        return known.collectives.get(op) if known is not None else None

    def _spans_of(self, group: str) -> frozenset[GroupSpan]:
        """Return the distinct spans of the groups of an axis."""
        if (on := self._on_nodes(group)) is None:
            return frozenset()
        stride = on.members[:, 1] - on.members[:, 0]
        kinds = np.unique(np.stack([on.most(on.ranks), stride], axis=1), axis=0).tolist()
        return frozenset(GroupSpan(on.members.shape[1], most, apart) for most, apart in kinds)

    def _on_nodes_of(self, group: str) -> GroupsOnNodes | None:
        """Return every group of the axis with more than one member; None if there is none."""
        members = self.placement.members(group)
        return GroupsOnNodes(members, self.placement.nodes(members)) if members.size else None

    def _link_of(self, group: str) -> str:
        on = self._on_nodes(group)
        if on is None or (on.nodes > 1).any():
            return BETWEEN_NODES if on is not None else ""
        return self.placement.link_of(group, on.members[0].tolist())

    def _rings_of(self, group: str) -> tuple[Ring, ...]:
        """Return the distinct rings of the groups of an axis."""
        on = self._on_nodes(group)
        if on is None:
            return ()
        rate = np.full(len(on.ranks), np.inf)
        start, half, within, between, chunk = np.zeros((5, len(on.members)))
        shared, across = on.ranks > 1, on.nodes[on.group] > 1
        if shared.any():
            link = self.placement.link_of(group, on.members_of(int(shared.argmax())))
            inside = self._rate_inside(link, on.by_node(shared), on.by_node(shared * on.ranks))
            rate[shared] = inside[on.node[shared]]
            some = on.most(shared)
            within = some * self.number(link, "latency_s")
            start, half = some * self.number(link, "start_s"), some * self.number(link, "half_bytes")
        if across.any():
            rate[across] = np.minimum(rate[across], self._adapters().rates(on, across))
            some = on.most(across)
            between = some * self.number(BETWEEN_NODES, "latency_s")
            chunk = some * self.number(BETWEEN_NODES, "chunk_s")
            start = np.maximum(start, some * self.number(BETWEEN_NODES, "start_s"))
            half = np.maximum(half, some * self.number(BETWEEN_NODES, "half_bytes"))
        slowest = -on.most(-rate)
        if across.any() and (pods := self._pods) is not None:
            slowest = pods.rings(self.placement.nodes(on.members), slowest)
        kinds = np.stack([on.nodes, slowest, start, within, between, half, chunk], axis=1)
        size = on.members.shape[1]
        return tuple(Ring(size, int(nodes), *rest) for nodes, *rest in _distinct_rows(kinds))

    def _rate_inside(self, link: str, groups: Numbers, ranks: Numbers) -> Numbers:
        """Return the bytes/s of a ring in nodes in which `ranks` devices form `groups` rings at the same time."""
        if self.system.links[link].per == "node":
            return self.peak(link) / np.maximum(ranks, 1)
        alone = np.maximum(groups, 1)
        if link == PCIE:  # all rings of a node pass the same host bridges and the link of its sockets
            return self.peak(link) / alone
        others: Numbers = np.maximum(ranks / alone, 2) - 1
        return self.peak(link) * np.minimum(1.0, self.number(link, "pair") * others)

    def _adapters(self) -> Adapters:
        """Return the network adapters of every node."""
        link = self.system.links.get(BETWEEN_NODES)
        if link is None:
            self.system.link_per_device(BETWEEN_NODES)  # raises ConfigError with the known links
        assert link is not None
        devices = int(self.system.devices_per_node.known("devices_per_node", system=self.system.name))
        count = devices if link.per == "device" else int(self.number(BETWEEN_NODES, "adapters"))
        each = self.peak(BETWEEN_NODES) / (1 if link.per == "device" else count)
        rings, switch = (int(self.number(BETWEEN_NODES, key)) for key in ("rings", "switch"))
        return Adapters(devices, count, each, rings, switch)

    @cached_property
    def _pods(self) -> Pods | None:
        """Pods of nodes that share their uplink; None without oversubscription."""
        factor = self.number(BETWEEN_NODES, "oversubscription")
        if factor == 1:
            return None
        nodes, adapters = int(self.number(BETWEEN_NODES, "pod")), self._adapters()
        return Pods(nodes, nodes * adapters.count * adapters.each / factor)

    def _edge_of(self, from_stage: int, to_stage: int) -> GroupsOnNodes:
        """Return all pairs of a sending rank of one stage and a receiving rank of another."""
        pairs = self.placement.members("pp")[:, [from_stage, to_stage]]
        return GroupsOnNodes(pairs, self.placement.nodes(pairs))

    def _slowest_link(self, from_stage: int, to_stage: int) -> str:
        edge = self._edge(from_stage, to_stage)
        return (
            BETWEEN_NODES
            if (edge.nodes > 1).any()
            else self.placement.link_of("pp", edge.members[0].tolist())
        )

    def _slowest_rate(self, from_stage: int, to_stage: int) -> float:
        """Return the bytes/s of a rank of one stage that sends to another, while all ranks of the stage send."""
        edge = self._edge(from_stage, to_stage)
        across = edge.nodes > 1
        senders = edge.members[across if across.any() else slice(None), :1]
        alone = edge.once("senders", lambda: GroupsOnNodes(senders, self.placement.nodes(senders)))
        if across.any():
            # A message uses all adapters near its device in turn, but a ring uses those of its communicator.
            rates = replace(self._adapters(), switch=1).rates(alone, alone.ranks > 0)
            if (pods := self._pods) is not None:
                rates = pods.messages(self.placement.nodes(edge.members[across]), rates[alone.of_member])
            return float(rates.min())
        ranks = alone.by_node(alone.ranks)
        return float(self._rate_inside(self._edge_link(from_stage, to_stage), ranks, ranks)[alone.node].min())


def _distinct_rows(rows: Numbers) -> list[list[float]]:
    """Return the distinct rows, in order; there are few of them."""
    found = []
    while len(rows):
        found.append(rows[0].tolist())
        rows = rows[(rows != rows[0]).any(axis=1)]
    return sorted(found)


class SeveralNetworks:
    """`Network` of several systems, with every message's seconds in lanes, [systems]."""

    def __init__(self, systems: Sequence[System], layout: Layout):
        placed: dict[object, Network] = {}

        def network_of(system: System) -> Network:
            """Return the network of `system`; systems with as many devices per node share the placement of groups."""
            found = Network(system, layout, placed.get(system.devices_per_node))
            placed.setdefault(system.devices_per_node, found)
            return found

        keys = [(id(system.links), system.devices_per_node) for system in systems]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        networks = [network_of(systems[keys.index(key)]) for key in places]
        of_lane = np.array([places[key] for key in keys])

        def each(seconds: Callable[[Network], float]) -> float:
            """Return `seconds` of every lane, [lanes], computed once for equal networks."""
            return cast(float, np.array([seconds(network) for network in networks])[of_lane])

        self.layout, self.system = layout, systems[0]
        self.overlap_cost = each(lambda network: network.overlap_cost)
        self.messages = networks[0].messages
        """`Network.messages`; only calibrated systems use it, and their measured numbers have no unknowns."""
        self.lanes = np.zeros(len(systems)).__add__
        """Function that converts a number to lanes."""
        self.seconds: Callable[[str, str, int], float] = cache(
            lambda op, group, payload: each(lambda network: network.seconds(op, group, payload))
        )
        self._send = cache(
            lambda payload, source, to: each(
                lambda network: network.send_seconds(payload, from_stage=source, to_stage=to)
            )
        )

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Return the seconds of `payload` bytes from each rank of a stage to its peer."""
        return self._send(payload, from_stage, to_stage)
