"""What a record says of the emulated network that its run was on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from repro.config import EmulatedNetwork
from repro.results.parts import RecordPart


@dataclass(frozen=True, kw_only=True)
class RankOnNetwork(RecordPart):
    """What a rank on an emulated network saw of it.  Bytes are means over the timed steps, headers included."""

    compute_flops_per_s: float
    """Of matrix products before the first step, while all ranks computed."""
    core_share: float
    """Seconds of processor time that the rank computes in each second, at most."""
    sent_bytes: float
    received_bytes: float
    """Of one step, by the rank's own interface."""
    node_sent_bytes: float | None = None
    node_received_bytes: float | None = None
    """Of one step, by its node's interface: of the first rank of each node."""
    facts: dict[str, Any] | None = None
    """As `repro.emulate.network.Facts` says it: of rank 0."""


@dataclass(frozen=True, kw_only=True)
class NetworkReport(RecordPart):
    """The emulated network that a measurement ran on; what was asked is in the conditions."""

    mtu: int
    payload_share: float
    """Fraction of a link's bytes that is payload, under full load in both directions."""
    rates: dict[str, list[float]]
    """Measured bytes/s of every link before the run, by kind and direction."""
    round_trip_s: dict[str, float]
    """Of one byte, `within` a node and `between` nodes."""
    user_namespace: bool
    compute_flops_per_s: list[float]
    """By rank, of matrix products before the first step, while all ranks computed."""
    core_share: float
    """Seconds of processor time that a rank computes in each second, at most: also while others wait."""
    sent_bytes: list[float]
    received_bytes: list[float]
    """By rank, of one step, headers included: means over the timed steps by the interfaces' counters."""
    node_sent_bytes: list[float]
    node_received_bytes: list[float]
    """By node, over its link to the others."""

    def made(self, network: EmulatedNetwork) -> EmulatedNetwork:
        """`network` with the rates that its links had, measured before the run, whatever ranks compute at."""
        within = median(self.rates["rank sends"]) if network.within else 0.0
        between = median(self.rates["node sends"]) if network.between else 0.0
        return replace(network, within=within, between=between, flops_per_s=0.0)

    @classmethod
    def of(cls, ranks: Sequence[RankOnNetwork]) -> NetworkReport | None:
        """Of all ranks together; None without ranks on an emulated network."""
        if not ranks or (facts := ranks[0].facts) is None:
            return None
        return cls(
            mtu=facts["mtu"],
            payload_share=facts["payload_share"],
            rates=facts["rates"],
            round_trip_s=facts["round_trip_s"],
            user_namespace=facts["user_namespace"],
            compute_flops_per_s=[rank.compute_flops_per_s for rank in ranks],
            core_share=ranks[0].core_share,
            sent_bytes=[rank.sent_bytes for rank in ranks],
            received_bytes=[rank.received_bytes for rank in ranks],
            node_sent_bytes=[rank.node_sent_bytes for rank in ranks if rank.node_sent_bytes is not None],
            node_received_bytes=[r.node_received_bytes for r in ranks if r.node_received_bytes is not None],
        )
