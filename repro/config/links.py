"""Links between devices: peak bandwidth, parameters of the collectives' time model, and measured collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from repro.config.errors import require
from repro.config.quantity import (
    UNSAID,
    Quantity,
    assumed_quantities,
    check_fraction,
    check_positive,
    check_whole,
)

LINKS = ("memory", "nvlink", "pcie", "inter-node")
"""Classes of links, from the inside of a node outwards. `memory` is shared memory between processes on one processor.
`nvlink` and `pcie` connect the devices of a node, which use the first class that the system has."""
PER = ("device", "node")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")

ASSUMED_LINKS = {link: assumed_quantities("links", link) for link in LINKS}
"""Assumed values of a link's uncertain inputs, with their sources, by class of links and key."""
ASSUMED_ANY = assumed_quantities("any_link")
"""Assumed values of a link's uncertain inputs that are equal for every class of links, with their sources, by key."""
KEYS = (
    *("latency_s", "start_s", "efficiency", "half_bytes", "chunk_s"),
    *("pair", "adapters", "switch", "rings", "overlap_cost", "pod", "oversubscription"),
)
"""Keys of the optional numbers of a link in a system file, such as its latency."""


def check_classes(links: Iterable[str], file: str = "") -> None:
    """Raise `ConfigError` unless every name in `links` is a class of links: memory, nvlink, pcie or inter-node."""
    for link in links:
        require(link in LINKS, "links", link, f"one of {', '.join(LINKS)}", file=file)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Measured durations of a collective, `[links.CLASS.collectives.OPERATION]` of a calibrated system file."""

    points: tuple[tuple[float, float], ...]
    """Pairs (payload in bytes, seconds) with rising payloads, measured while all groups communicated at once."""
    ranks: int = 0
    """Number of ranks of a communication group; 0: all ranks of the measurement."""
    per_node: int = 0
    """Number of ranks of a communication group on one node; 0: all ranks of the group."""
    stride: int = 1
    """Rank distance between consecutive members of a communication group."""
    groups: tuple[Collective, ...] = ()
    """Measurements of the same collective in smaller groups."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        require(bool(sizes), "points", [], "at least one pair [bytes, seconds]")
        require(sizes == sorted(set(sizes)), "points", sizes, "pairs [bytes, seconds] with rising bytes")
        require(sizes[0] > 0, "points", sizes[0], "pairs [bytes, seconds] of more than 0 bytes")
        for _, seconds in self.points:
            require(seconds > 0, "points", seconds, "more than 0 seconds")
        for key, least in (("ranks", 0), ("per_node", 0), ("stride", 1)):
            require(getattr(self, key) >= least, key, getattr(self, key), f"an integer of at least {least}")
        require(
            all(part.ranks > 1 and not part.groups for part in self.groups),
            "groups",
            [part.ranks for part in self.groups],
            "groups of 2 or more ranks, each without groups of its own",
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """Links of one class, such as nvlink or inter-node, in a system."""

    per: str
    """Owner of the bandwidth: `device` if every device has the bandwidth, `node` if the devices of a node share it."""
    bandwidth: Quantity
    """Peak bandwidth of the link in one direction, in bytes/s."""
    latency_s: Quantity = UNSAID
    """Latency per message between two neighbours in each step of a large collective, in seconds, software included."""
    start_s: Quantity = UNSAID
    """Start-up time of a collective before its first step, in seconds."""
    efficiency: Quantity = UNSAID
    """Fraction of the peak bandwidth that collectives of large messages reach."""
    half_bytes: Quantity = UNSAID
    """Payload of a ring step, in bytes, with which the step reaches half of the bandwidth, its latency excluded."""
    chunk_s: Quantity = UNSAID
    """Time per chunk of a tree collective, in seconds; a node forwards a chunk after it has received all of it."""
    pair: Quantity = UNSAID
    """Fraction of a device's bandwidth that is available for traffic to a single other device. A ring of n devices of a
    node uses n - 1 times this fraction, at most 1."""
    adapters: Quantity = UNSAID
    """Number of network adapters of a node, which share its bandwidth equally; a device uses the nearest adapter."""
    switch: Quantity = UNSAID
    """Number of neighbouring devices that share a PCIe switch with their network adapters. A communicator with k of
    these devices uses the first k adapters, independent of other communicators of the node."""
    rings: Quantity = UNSAID
    """Maximum number of network adapters that one communicator uses at once."""
    overlap_cost: Quantity = UNSAID
    """Fraction of a collective's duration by which it delays concurrent compute, since both use the multiprocessors."""
    pod: Quantity = UNSAID
    """Number of consecutive nodes with full bisection bandwidth; for class pcie, devices of one host bridge."""
    oversubscription: Quantity = UNSAID
    """Ratio of the bandwidth of a pod's nodes to that of the pod's uplink: 7 for 1:7, 1 without oversubscription."""
    collectives: dict[str, Collective] = field(default_factory=dict)
    """Measured durations by collective, which take precedence over predicted durations."""
    hop: Collective | None = None
    """Measured processor time of a ring step by forwarded bytes per rank, for ranks that share cores; None: not
    measured. A ring step takes the maximum of the processor time and the transfer time."""

    def __post_init__(self) -> None:
        require(self.per in PER, "per", self.per, f"one of {', '.join(PER)}")
        check_positive("bandwidth", self.bandwidth)
        for key in ("efficiency", "pair"):
            check_fraction(key, getattr(self, key))
        for key in ("adapters", "switch", "rings", "pod"):
            check_whole(key, getattr(self, key))
        for factor in self.oversubscription.ends:
            what = "1 or more, as bandwidth of a pod's nodes over that of its uplink"
            require(factor >= 1, "oversubscription", factor, what)
        for cost in self.overlap_cost.ends:
            require(cost <= 1, "overlap_cost", cost, "a fraction from 0 to 1")
        for operation in self.collectives:
            known = ", ".join(OPERATIONS)
            require(operation in OPERATIONS, "collectives", operation, f"one of {known}")

    def used(self, name: str, key: str) -> Quantity:
        """Return the link's number `key`; if unknown, the value that is assumed for links of class `name`."""
        known: Quantity = getattr(self, key)
        return known.or_assumed(ASSUMED_LINKS.get(name, {}).get(key) or ASSUMED_ANY.get(key))
