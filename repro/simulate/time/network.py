"""Seconds of collectives and of messages between pipeline stages on a system's links.

Rings and trees follow NCCL's tuning model (NVIDIA/nccl src/graph/tuning.cc, 2.5 on). Collectives that `repro calibrate`
measured are interpolated instead. Not modelled: groups of different axes at the same time, devices with unequal NVLink
(DGX-1), protocols for small messages, and trees over two nodes with few adapters (NVIDIA/nccl#307).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cache, cached_property, reduce
from itertools import accumulate
from math import lcm, log2
from typing import NamedTuple, cast

import numpy as np

from repro.config import Layout
from repro.config.links import Collective
from repro.config.system import System
from repro.config.systems.unknowns import Lanes
from repro.parallel.ledger import RING_PASSES, SEND, messages_of
from repro.simulate.placement import BETWEEN_NODES, GROUPS, Placement
from repro.simulate.time.device import maximum, minimum
from repro.simulate.time.interconnect import (
    ALL_REDUCE,
    AdapterShare,
    NodeCounts,
    PlacedGroups,
    PlacedMessage,
    PlacedRing,
    Ring,
    placed_groups,
)


class GroupSpan(NamedTuple):
    """Size of a process group, and the distribution of its members over ranks and nodes."""

    ranks: int
    """Number of ranks in the process group."""
    per_node: int
    """Largest number of the process group's members on one node."""
    stride: int
    """Difference between the ranks of consecutive members of the process group."""


def measured_seconds(measured: Collective, all_ranks: int, span: GroupSpan, payload: float) -> float:
    """Return the seconds of a collective of `payload` bytes in groups of the size and placement `span`.

    The seconds are those of the measured group most similar in size, members per node and stride. They are scaled to
    the ring steps of `span.ranks` ranks. `all_ranks`: number of ranks of the measurement.
    """

    def distance(known: Collective) -> tuple[float, float]:
        ranks = known.ranks or all_ranks
        size, shared = log2(ranks / span.ranks), log2((known.per_node or ranks) / span.per_node)
        return abs(size) + abs(shared), abs(log2(known.stride / span.stride))

    nearest = min((measured, *measured.groups), key=distance)
    ranks = nearest.ranks or all_ranks
    if ranks < 2 or span.ranks == ranks:
        return interpolate(nearest, payload)
    return interpolate(nearest, payload * ranks / span.ranks) * (span.ranks - 1) / (ranks - 1)


def interpolate(measured: Collective, payload: float) -> float:
    """Return the seconds of `payload` bytes by linear interpolation between measured points (bytes and seconds).

    A point that is faster than one with a smaller payload gets the time of the latter. Below the first point, its time
    applies; above the last point, its bandwidth.
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
    """Communication times of `layout` on the links of `system`; arrays over sampled cases if its inputs are arrays."""

    def __init__(self, system: System, layout: Layout):
        self.system, self.layout = system, layout
        self.placement = Placement(layout, system)
        self.link, self._rings = cache(self._link_of), cache(self._rings_of)
        self._edge_link, self._edge_rate = cache(self._slowest_link), cache(self._slowest_rate)
        # Results are cached because a step repeats the same few collectives thousands of times.
        self._seconds, self._send_seconds = cache(self._seconds_of), cache(self._send_seconds_of)
        self._message_seconds = cache(self._message_seconds_of)

    @cached_property
    def overlap_cost(self) -> float:
        """Seconds that concurrent compute loses per second of a hidden collective, 0 to 1."""
        hidden = self.link("dp")  # Nearly all collectives that overlap with compute are those of dp.
        links = [hidden] if hidden else self.system.links
        return reduce(maximum, (self.number(link, "overlap_cost") for link in links), 0.0)

    def seconds(self, op: str, group: str, payload: int) -> float:
        """Return the seconds of a collective from the arrival of its last rank, for the slowest group.

        `op`: all_reduce, reduce_scatter, all_gather, broadcast. `group`: world, tp, cp, dp, pp, embedding; all groups
        of this name communicate at the same time. `payload`: bytes of the full message (see `repro.parallel.ledger`). A
        group of one rank takes 0 seconds. Raises `ConfigError` if the bandwidth is unknown.
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
        trees = "memory" not in self.system.links  # A CPU system uses gloo, which has only rings.

        def slowest(counts: NodeCounts) -> float:
            rings = self._rings(group, counts)
            times = (ring.seconds(op, payload, trees=trees, cores_s=self._cores_s) for ring in rings)
            return reduce(maximum, times, 0.0)

        return self._in_node_counts(self.link(group), slowest)

    def _cores_s(self, payload: float) -> float:
        """Return the seconds that CPU cores need for one ring step of `payload` bytes of every rank; 0 on GPUs."""
        hops = (link.hop for link in self.system.links.values() if link.hop is not None)
        return max((interpolate(hop, payload) for hop in hops), default=0.0)

    def messages(self, op: str, group: str) -> int:
        """Return the number of messages that a rank's compute thread starts and awaits in a collective of gloo.

        The number is 1 for groups with several nodes and several ranks on a node, where another thread exchanges the
        messages (`GlooRing`).
        """
        on = self._placed.on_nodes(group)
        if on is None or ((on.nodes > 1) & (on.most(on.ranks) > 1)).all():
            return 1
        return messages_of(op, on.members.shape[1])

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Return the seconds in which all ranks of a stage send `payload` bytes to their peers in another stage."""
        return self._send_seconds(payload, from_stage, to_stage) if from_stage != to_stage else 0.0

    def _send_seconds_of(self, payload: int, from_stage: int, to_stage: int) -> float:
        """Return the seconds of a message between two stages, which are cached for stages of equal placement."""
        offsets = self.layout.offsets("pp")
        sender, receiver = offsets[from_stage], offsets[to_stage]
        shift = min(sender, receiver) // self._period * self._period
        return self._message_seconds(payload, sender - shift, receiver - shift)

    @cached_property
    def _period(self) -> int:
        """Number of ranks after which the placement of messages on nodes and pods repeats."""
        known = self._node_counts if BETWEEN_NODES in self.system.links else ()
        return self._placed.devices * lcm(*(counts.pod for counts in known if counts.pod))

    def _message_seconds_of(self, payload: int, sender: int, receiver: int) -> float:
        """Return the seconds of a message between two pipeline stages whose first ranks are `sender` and `receiver`."""
        link = self._edge_link(sender, receiver)
        measured = self._measured(SEND, link)
        if measured is not None:
            return interpolate(measured, payload)
        return self.number(link, "latency_s") + payload / self._edge_rate(sender, receiver)

    def bus_bandwidth(self, group: str) -> float:
        """Return the slowest bus bandwidth (nccl-tests) of all groups of a kind, for large messages, in bytes/s."""

        def slowest(counts: NodeCounts) -> float:
            return reduce(minimum, (ring.rate for ring in self._rings(group, counts)), float("inf"))

        return self._in_node_counts(self.link(group), slowest)

    def least_seconds(self, op: str, group: str, payload: float, count: int) -> float:
        """Return a lower bound of the seconds of `count` collectives with a total payload of `payload` bytes.

        The bound is the time of a ring algorithm. The bound of an all-reduce has no latency, because a tree may be
        faster for small payloads.
        """

        def slowest(counts: NodeCounts) -> float:
            return reduce(maximum, (least(ring) for ring in self._rings(group, counts)), 0.0)

        def least(ring: Ring) -> float:
            if op == ALL_REDUCE:
                return RING_PASSES[op] * (ring.ranks - 1) / ring.ranks * payload / ring.rate
            empty, full = (ring.seconds(op, size, trees=False) for size in (0, int(payload)))
            return (count - 1) * empty + full

        return self._in_node_counts(self.link(group), slowest)

    def number(self, link: str, key: str) -> float:
        """Return the value of the key `key` for a class of links, from the system's file or else assumed."""
        return self.system.links[link].used(link, key).known(f"links.{link}.{key}", system=self.system.name)

    def peak(self, link: str) -> float:
        """Return the bytes/s of collectives on a link class, per node for `per = "node"`, otherwise per device."""
        found = self.system.links[link].bandwidth.known(f"links.{link}.bandwidth", system=self.system.name)
        return found * self.number(link, "efficiency")

    def _measured(self, op: str, link: str) -> Collective | None:
        """Return the measured times of the collective `op` on a class of links; None if the system's file has none."""
        known = self.system.links.get(link)
        return known.collectives.get(op) if known is not None else None

    def _spans(self, group: str) -> frozenset[GroupSpan]:
        """Return the distinct sizes and distributions (`GroupSpan`) of all process groups of a kind, such as tp."""
        if (on := self._placed.on_nodes(group)) is None:
            return frozenset()
        stride = on.members[:, 1] - on.members[:, 0]
        kinds = np.unique(np.stack([on.most(on.ranks), stride], axis=1), axis=0).tolist()
        return frozenset(GroupSpan(on.members.shape[1], most, apart) for most, apart in kinds)

    @cached_property
    def _placed(self) -> PlacedGroups:
        """Placement of the layout's process groups on the nodes of the system."""
        return placed_groups(self.layout, self.placement.devices_per_node)

    def _link_of(self, group: str) -> str:
        """Return the slowest class of links in any group of a kind (such as tp); empty if groups have one rank."""
        on = self._placed.on_nodes(group)
        if on is None or (on.nodes > 1).any():
            return BETWEEN_NODES if on is not None else ""
        return self.placement.link_of(group, on.members[0].tolist())

    @cached_property
    def _node_counts(self) -> dict[NodeCounts, Lanes]:
        """Distinct counts of adapters, switches and pods, each with a mask of the sampled cases with these counts."""
        if BETWEEN_NODES not in self.system.links:
            # The call raises a ConfigError that names the known links.
            self.system.link_per_device(BETWEEN_NODES)
        names = ("adapters", "switch", "pod", "oversubscription")
        adapters, switch, pod, factor = (self.number(BETWEEN_NODES, name) for name in names)
        if self.system.links[BETWEEN_NODES].per == "device":
            adapters = self._placed.devices
        cases = np.stack(np.broadcast_arrays(adapters, switch, pod * (factor != 1)), axis=-1)
        distinct = np.unique(cases.reshape(-1, cases.shape[-1]), axis=0)
        return {NodeCounts(*map(int, one)): (cases == one).all(axis=-1) for one in distinct}

    def _in_node_counts(self, link: str, find: Callable[[NodeCounts], float]) -> float:
        """Return `find(counts of adapters, switches and pods)` for each sampled case; for links inside a node, once."""
        if link != BETWEEN_NODES:
            return find(NodeCounts())
        found = [find(counts) for counts in self._node_counts]
        cases = list(self._node_counts.values())
        return found[0] if len(found) == 1 else cast(float, np.select(cases, found))

    def _rings_of(self, group: str, counts: NodeCounts) -> list[Ring]:
        """Return the parameters of the distinct rings of all process groups of a kind, such as tp."""
        return [self._ring(group, placed, counts) for placed in self._placed.rings(group, counts)]

    def _ring(self, group: str, placed: PlacedRing, counts: NodeCounts) -> Ring:
        rate, start, half, within, between, chunk = float("inf"), 0.0, 0.0, 0.0, 0.0, 0.0
        if placed.inside:
            link = self.placement.link_of(group, self._placed.neighbours(group))
            leaves = self._leaves_pod(group, link)
            rate = reduce(minimum, (self._rate_inside(link, *each, leaves) for each in placed.inside))
            within, start, half = (self.number(link, key) for key in ("latency_s", "start_s", "half_bytes"))
        if placed.between:
            rate = minimum(rate, self._rate_between(placed.between, placed.uplink_users, counts))
            between, chunk = (self.number(BETWEEN_NODES, key) for key in ("latency_s", "chunk_s"))
            start = maximum(start, self.number(BETWEEN_NODES, "start_s"))
            half = maximum(half, self.number(BETWEEN_NODES, "half_bytes"))
        return Ring(placed.ranks, placed.nodes, rate, start, within, between, half, chunk)

    def _leaves_pod(self, group: str, link: str) -> bool:
        """Return whether any ring of this kind of group (such as tp) has devices at several PCIe host bridges."""
        on, pod = self._placed.on_nodes(group), self.system.links[link].pod.value or 1
        assert on is not None
        bridges = on.members % self.placement.devices_per_node // int(pod)
        return bool((bridges != bridges[:, :1]).any())

    def _rate_inside(self, link: str, groups: int, ranks: int, leaves_pod: bool = True) -> float:
        """Return the bytes/s of one ring inside a node whose `ranks` devices form `groups` rings at the same time."""
        if self.system.links[link].per == "node":
            return self.peak(link) / ranks
        if link == PCIE:  # All rings between host bridges share the link between the CPU sockets.
            uplink = (self.system.links[link].pod.value or 1) / self.number(link, "oversubscription")
            return self.peak(link) * (minimum(1.0, uplink / groups) if leaves_pod else 1.0)
        others = max(ranks / groups, 2) - 1
        return self.peak(link) * minimum(1.0, self.number(link, "pair") * others)

    def _rate_between(self, shares: Iterable[AdapterShare], uplink_users: int, counts: NodeCounts) -> float:
        """Return the bytes/s of a ring or message, limited by its nodes' adapter `shares` and by its uplink."""
        per_device = self.system.links[BETWEEN_NODES].per == "device"
        adapter = self.peak(BETWEEN_NODES) / (1 if per_device else counts.adapters)
        rings = self.number(BETWEEN_NODES, "rings")
        used = (minimum(minimum(rings, each.adapters), each.part) for each in shares)
        rate = reduce(minimum, (share * adapter for share in used))
        if uplink_users:
            uplink = counts.pod * counts.adapters * adapter / self.number(BETWEEN_NODES, "oversubscription")
            rate = minimum(rate, uplink / uplink_users)
        return rate

    def _slowest_link(self, sender: int, receiver: int) -> str:
        edge = self._placed.edge(sender, receiver)
        if (edge.nodes > 1).any():
            return BETWEEN_NODES
        return self.placement.link_of("pp", edge.members[0].tolist())

    def _slowest_rate(self, sender: int, receiver: int) -> float:
        """Return the bytes/s of a pipeline stage's slowest rank while all its ranks send to peers in another stage."""
        link = self._edge_link(sender, receiver)

        def rate(placed: PlacedMessage, counts: NodeCounts) -> float:
            if placed.share is None:
                return self._rate_inside(link, placed.senders, placed.senders)
            return self._rate_between((placed.share,), placed.uplink_users, counts)

        def slowest(counts: NodeCounts) -> float:
            placed = self._placed.messages(sender, receiver, counts)
            return reduce(minimum, (rate(message, counts) for message in placed))

        return self._in_node_counts(link, slowest)
