"""An emulated network: nodes and ranks on one machine, whose links have the requested rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from repro.config.errors import require
from repro.config.sizes import POSITIVE_COUNT, at_least

CORES_SHARE = 0.8
"""Share of each compute core that its ranks use together; the rest compensates time that other programs take."""


def core_share(ranks: int, cores: int) -> float:
    """Return the maximum share of a core for each of `ranks` ranks.  `cores`: number of cores for computing ranks."""
    return CORES_SHARE * min(1.0, cores / ranks)


@dataclass(frozen=True, kw_only=True)
class EmulatedNetwork:
    """Nodes behind one switch, and the ranks of each behind a switch of its own.

    Rates are bytes/s on the wire, headers included, in each direction; 0 is no limit.  Rank `r` is on node
    `r // ranks_per_node`.
    """

    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Ranks of each node."""
    between: float = 0.0
    """Rate of a node's link to the switch between the nodes; all its ranks share it."""
    within: float = 0.0
    """Rate of a rank's own link to its node's switch, for all that it sends and receives."""
    delay_s: float = 0.0
    """Delay of each message between nodes, one way; needs a kernel with netem."""
    flops_per_s: float = 0.0
    """FLOP/s of a rank's matrix products (`repro.emulate.compute_rate`) for which the link rates hold.  Link rates are
    scaled to the machine's own FLOP/s; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        at_least(self, ("nodes", "ranks_per_node"), 1, POSITIVE_COUNT)
        at_least(self, ("between", "within", "delay_s", "flops_per_s"), 0, "0 (none) or more")
        for key in ("between", "within"):
            rate = getattr(self, key)
            require(rate == 0 or rate >= 1, key, rate, "0 (none), or at least 1 byte a second")
        require(
            (self.between > 0) == (self.nodes > 1),
            "between",
            self.between,
            "bytes/s of a node's link"
            if self.nodes > 1
            else "left out with one node, which has no such link",
        )
        require(
            self.delay_s == 0 or self.nodes > 1,
            "delay_s",
            self.delay_s,
            "0 with one node, whose ranks have none",
        )

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Return the node of `rank`."""
        return rank // self.ranks_per_node

    def scaled(self, flops_per_s: float) -> EmulatedNetwork:
        """Return the same network with link rates scaled to ranks that compute at this rate."""
        times = flops_per_s / self.flops_per_s
        return replace(
            self, between=self.between * times, within=self.within * times, flops_per_s=flops_per_s
        )

    def chosen(self) -> dict[str, Any]:
        """Return the settings that differ from no limit and no delay, for an experiment's key."""
        return {key: value for key, value in asdict(self).items() if value}

    def __str__(self) -> str:
        """Return `4 nodes x 4 ranks, between 8e+06, within 2e+07`, rates in bytes/s."""
        shown = ("between", "within", "delay_s")
        limits = "".join(f", {key} {value:g}" for key, value in self.chosen().items() if key in shown)
        return f"{self.nodes} nodes x {self.ranks_per_node} ranks{limits}"
