"""Links between devices as data: peak bandwidth, and the rates of collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from repro.config.errors import ConfigError, require
from repro.config.quantity import (
    UNSAID,
    Quantity,
    assumed_quantities,
    check_fraction,
    check_positive,
    check_whole,
)

LINKS = ("memory", "nvlink", "pcie", "inter-node")
"""Classes of links, from the inside of a node outwards.  `memory` joins processes that share one processor
as their device.  nvlink and pcie join the devices of a node, which use the first class that they have."""
PER = ("device", "node")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")

ASSUMED_LINKS = {link: assumed_quantities("links", link) for link in LINKS}
"""Assumed values, with their sources, for keys of a `Link` that a system does not know, by class of links."""
ASSUMED_ANY = assumed_quantities("any_link")
"""Assumed values, with their sources, for every class."""
KEYS = (
    *("latency_s", "start_s", "efficiency", "half_bytes", "chunk_s"),
    *("pair", "adapters", "switch", "rings", "overlap_cost", "pod", "oversubscription"),
)
"""Optional numbers of a link."""


def check_classes(links: Iterable[str], file: str = "") -> None:
    """Raise `ConfigError` unless these are classes of links."""
    for link in links:
        if link not in LINKS:
            raise ConfigError("links", link, f"one of {', '.join(LINKS)}", file=file)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """`[links.CLASS.collectives.OP]` of a calibrated file."""

    points: tuple[tuple[float, float], ...]
    """(payload in bytes, seconds), by payload, all groups of this kind at the same time."""
    ranks: int = 0
    """Members of a group; 0: all ranks of the file's provenance."""
    per_node: int = 0
    """Members of a group on one node; 0: all members."""
    stride: int = 1
    """Distance in ranks from one member to the next."""
    groups: tuple[Collective, ...] = ()
    """Measurements of the same collective in smaller groups."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        require(bool(sizes), "points", [], "at least one [bytes, seconds]")
        require(sizes == sorted(set(sizes)), "points", sizes, "payloads that rise")
        require(sizes[0] > 0, "points", sizes[0], "payloads of more than 0 bytes")
        for _, seconds in self.points:
            require(seconds > 0, "points", seconds, "more than 0 seconds")
        for key, least in (("ranks", 0), ("per_node", 0), ("stride", 1)):
            require(getattr(self, key) >= least, key, getattr(self, key), f"a whole number, {least} or more")
        require(
            all(part.ranks > 1 and not part.groups for part in self.groups),
            "groups",
            [part.ranks for part in self.groups],
            "ranks of 2 or more for each, and none with groups of its own",
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """One class of links."""

    per: str
    """`device`: every device has this bandwidth; `node`: a node's devices share it."""
    bandwidth: Quantity
    """Peak bytes/s in one direction."""
    latency_s: Quantity = UNSAID
    """Seconds of one message between two neighbours, software included, in the steps of a large collective."""
    start_s: Quantity = UNSAID
    """Seconds of a collective before its first step."""
    efficiency: Quantity = UNSAID
    """Fraction of the bandwidth that collectives of large messages reach."""
    half_bytes: Quantity = UNSAID
    """Payload of a step that reaches half of this fraction, in addition to the effect of latency_s."""
    chunk_s: Quantity = UNSAID
    """Seconds of a chunk, which a node of a tree receives fully before it forwards it; a small message is one."""
    pair: Quantity = UNSAID
    """Fraction of a device's bandwidth to one other: a ring of n devices of a node has n - 1 times it, at most 1."""
    adapters: Quantity = UNSAID
    """Network adapters of a node, each with an equal part of its bandwidth; a device uses the nearest."""
    switch: Quantity = UNSAID
    """Neighbouring devices behind one PCIe switch with their adapters.  A communicator with k of these devices uses the
    first k adapters, independent of other communicators of the node."""
    rings: Quantity = UNSAID
    """Maximum number of adapters that one communicator uses at once."""
    overlap_cost: Quantity = UNSAID
    """Fraction of a collective's seconds that concurrent compute loses, because both need the multiprocessors."""
    pod: Quantity = UNSAID
    """Consecutive nodes that reach each other at full bisection bandwidth; of PCIe, devices behind one host bridge."""
    oversubscription: Quantity = UNSAID
    """Bandwidth of a pod's nodes over that of its uplink, 7 for 1:7; 1: no oversubscription."""
    collectives: dict[str, Collective] = field(default_factory=dict)
    """Measured seconds by operation, which take precedence over the formula."""
    hop: Collective | None = None
    """Core seconds of a ring step, by the bytes that every rank forwards, if ranks share cores.  A step takes the
    maximum of these seconds and those of its link."""

    def __post_init__(self) -> None:
        require(self.per in PER, "per", self.per, f"one of {', '.join(PER)}")
        check_positive("bandwidth", self.bandwidth)
        for key in ("efficiency", "pair"):
            check_fraction(key, getattr(self, key))
        for key in ("adapters", "switch", "rings", "pod"):
            check_whole(key, getattr(self, key))
        for factor in self.oversubscription.ends:
            what = "1 or more: bandwidth below over bandwidth above"
            require(factor >= 1, "oversubscription", factor, what)
        for cost in self.overlap_cost.ends:
            require(cost <= 1, "overlap_cost", cost, "a fraction, 0 to 1")
        for operation in self.collectives:
            known = ", ".join(OPERATIONS)
            require(operation in OPERATIONS, "collectives", operation, f"one of {known}")

    def used(self, name: str, key: str) -> Quantity:
        """Return `key` of this link of class `name`; if it is unknown, the assumed value, marked as assumed."""
        known: Quantity = getattr(self, key)
        return known.or_assumed(ASSUMED_LINKS.get(name, {}).get(key) or ASSUMED_ANY.get(key))
