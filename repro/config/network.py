"""Emulated network: nodes and ranks on one machine, connected by links with limited rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from repro.config.errors import require
from repro.config.sizes import POSITIVE_COUNT, at_least

CORES_SHARE = 0.8
"""Fraction of a processor core that its emulated ranks use together; the rest compensates for other programs."""


def core_share(ranks: int, cores: int) -> float:
    """Return the fraction of a processor core that each of `ranks` emulated ranks gets on `cores` cores."""
    return CORES_SHARE * min(1.0, cores / ranks)


@dataclass(frozen=True, kw_only=True)
class EmulatedNetwork:
    """Emulated nodes connected by one switch, with the ranks of each node connected by a second switch.

    Rates are bytes/s on the wire, headers included, in each direction; 0 means no limit.  Rank `r` is on node
    `r // ranks_per_node`.
    """

    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Number of emulated ranks on each node."""
    between: float = 0.0
    """Rate of a node's link to the other nodes, in bytes/s, which all ranks of the node share; 0 with one node."""
    within: float = 0.0
    """Rate of a rank's link to the switch of its node, in bytes/s, for all messages of the rank; 0: no limit."""
    delay_s: float = 0.0
    """One-way delay of messages between nodes, in seconds; more than 0 needs a kernel with netem."""
    flops_per_s: float = 0.0
    """Compute rate of a rank in FLOP/s (`repro.emulate.compute_rate`) for which the link rates are given. On a machine
    with another compute rate, link rates are scaled in proportion; 0: link rates are used unchanged."""

    def __post_init__(self) -> None:
        at_least(self, ("nodes", "ranks_per_node"), 1, POSITIVE_COUNT)
        at_least(self, ("between", "within", "delay_s", "flops_per_s"), 0, "0 (none) or more")
        for key in ("between", "within"):
            rate = getattr(self, key)
            require(rate == 0 or rate >= 1, key, rate, "0 (no limit), or at least 1 byte/s")
        require(
            (self.between > 0) == (self.nodes > 1),
            "between",
            self.between,
            "a rate in bytes/s with several nodes"
            if self.nodes > 1
            else "omitted with one node, which has no link to other nodes",
        )
        right = "0 with one node, since only messages between nodes are delayed"
        require(self.delay_s == 0 or self.nodes > 1, "delay_s", self.delay_s, right)

    @property
    def world(self) -> int:
        """Return the number of emulated ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Return the index of the emulated node on which `rank` runs."""
        return rank // self.ranks_per_node

    def scaled(self, flops_per_s: float) -> EmulatedNetwork:
        """Return the emulated network with link rates scaled to ranks that compute `flops_per_s`."""
        times = flops_per_s / self.flops_per_s
        return replace(
            self, between=self.between * times, within=self.within * times, flops_per_s=flops_per_s
        )

    def chosen(self) -> dict[str, Any]:
        """Return the network settings that are not 0, for the hash that identifies an experiment."""
        return {key: value for key, value in asdict(self).items() if value}

    def __str__(self) -> str:
        """Return nodes, ranks and rates in bytes/s as text: `4 nodes x 4 ranks, between 8e+06, within 2e+07`."""
        shown = ("between", "within", "delay_s")
        limits = "".join(f", {key} {value:g}" for key, value in self.chosen().items() if key in shown)
        return f"{self.nodes} nodes x {self.ranks_per_node} ranks{limits}"
