"""Ledger of communication: calls and bytes by operation, group and purpose.

`payload_bytes` is the size of the full (unsharded) message. `sent_bytes` are the bytes that one rank sends under a ring
algorithm, the unit of the papers' volumes (1910.02054 sec. 7.1; 2104.04473 sec. 3.2): `2 (n-1)/n` of the payload for an
all-reduce, `(n-1)/n` for a reduce-scatter or an all-gather. A point-to-point message is counted once, by its sender.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

RING_PASSES = {
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "broadcast": 1,
    "reduce": 1,
    "all_to_all": 1,
}
SEND = "send"
EXCHANGED = ("reduce_scatter", "all_gather")
"""Collectives that the gloo transport executes as direct messages from each rank to every other rank."""

Address = tuple[int, int]
"""(receiver's rank in the group, channel number) of a point-to-point message."""
NO_PEER: Address = (-1, 0)
"""Placeholder for the receiver's address in records of collectives, which have no single receiver."""


def messages_of(op: str, size: int) -> int:
    """Return how many sends and receives a rank starts for collective `op` among `size` ranks of the gloo transport."""
    return 2 * (size - 1) if op in EXCHANGED else 1


@dataclass
class Traffic:
    """Number of calls and bytes of one communication operation in one group of `size` ranks, for one purpose."""

    size: int
    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


@dataclass
class CommLedger:
    """Counters of all collectives and messages that one rank starts, over all groups of the rank."""

    traffic: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)
    sequence: int = 0
    """Number of collectives and sends that this rank has started since the ledger was created."""
    observers: list[Callable[[int, str, str, str], None]] = field(default_factory=list)
    """Functions that are called with (sequence number, operation, group, purpose) when communication starts."""

    def count(
        self, op: str, group: str, size: int, payload_bytes: int, purpose: str, to: Address = NO_PEER
    ) -> int:
        """Count a collective over `size` ranks, or a message, of `payload_bytes`; return this rank's sent bytes."""
        self.sequence += 1
        row = self.traffic.get((op, group, purpose))
        if row is None:
            row = self.traffic[op, group, purpose] = Traffic(size)
        row.calls += 1
        row.payload_bytes += payload_bytes
        sent = payload_bytes if op == SEND else RING_PASSES[op] * payload_bytes * (size - 1) // size
        row.sent_bytes += sent
        for observe in self.observers:
            observe(self.sequence, op, group, purpose)
        return sent

    def reset(self) -> None:
        """Clear the counts of calls and bytes, but not the sequence number of collectives."""
        self.traffic.clear()

    def rows(self) -> list[dict[str, Any]]:
        """Return the calls and bytes of communication as dictionaries, one for each operation, group and purpose."""
        return [
            {"op": op, "group": group, "purpose": purpose, **vars(traffic)}
            for (op, group, purpose), traffic in sorted(self.traffic.items())
        ]
