"""Ledger of communication: calls and bytes by operation, group and purpose.

`payload_bytes` is the size of the full (unsharded) message.  `sent_bytes` are the bytes that one rank sends under a
ring algorithm, the unit of the papers' volumes (1910.02054 sec. 7.1; 2104.04473 sec. 3.2): `2 (n-1)/n` of the payload
for an all-reduce, `(n-1)/n` for a reduce-scatter or an all-gather.  A message between two ranks is sent once, and
counted by its sender.
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
"""Collectives that the gloo transport builds from messages of each rank to every other rank."""

Address = tuple[int, int]
"""Receiver of a message, as a rank of the group, and the channel of the message."""
NO_PEER: Address = (-1, 0)
"""Address that a collective is counted with, because it has no receiver."""


def messages_of(op: str, size: int) -> int:
    """Return how many sends and receives a rank starts for collective `op` among `size` ranks of the gloo transport."""
    return 2 * (size - 1) if op in EXCHANGED else 1


@dataclass
class Traffic:
    """Calls and bytes of one operation in one group (`size` ranks) for one purpose."""

    size: int
    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


@dataclass
class CommLedger:
    """Counters of every collective of one rank. A ledger belongs to one set of groups."""

    traffic: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)
    sequence: int = 0
    """Number of collectives and sends that this rank has started; `reset` does not change it."""
    observers: list[Callable[[int, str, str, str], None]] = field(default_factory=list)
    """Functions that are called with (sequence, operation, group, purpose) when a collective starts."""

    def count(
        self, op: str, group: str, size: int, payload_bytes: int, purpose: str, to: Address = NO_PEER
    ) -> int:
        """Count a collective of `payload_bytes` over `size` ranks or a message; return this rank's sent bytes."""
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
        """Clear the counts; the sequence number continues."""
        self.traffic.clear()

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts as dictionaries, one for each operation, group and purpose."""
        return [
            {"op": op, "group": group, "purpose": purpose, **vars(traffic)}
            for (op, group, purpose), traffic in sorted(self.traffic.items())
        ]
