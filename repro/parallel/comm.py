"""Groups of ranks: every collective and message of the suite passes through a `Group`, which counts calls and bytes.

The group's `repro.parallel.transports.Transport` transmits.  Other modules do not communicate.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from repro.parallel.ledger import NO_PEER, Address, CommLedger
from repro.parallel.transports import MAX, SUM, GlooTransport, NoTransport, Transport, Work

__all__ = ["MAX", "SUM", "Group", "Work"]


class Group:
    """Ordered set of communicating ranks. Each rank of the set has an object with its own `rank`."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        transport: Transport,
        ledger: CommLedger,
        *,
        blocking: bool = False,
    ):
        """`blocking`: wait for every collective directly after its launch, as in software without overlap."""
        self.name, self.ranks, self.size, self.blocking = name, ranks, len(ranks), blocking
        self.rank = ranks.index(rank)
        """Index of this rank within the group."""
        self.transport: Transport = transport if self.size > 1 else NoTransport()
        self.ledger = ledger

    def __repr__(self) -> str:
        return f"Group({self.name}: rank {self.rank} of {self.size})"

    def on_channel(self, channel: int) -> Group:
        """Return a group of the same ranks whose collectives match only those on the same channel of other ranks.

        Only the gloo transport supports this. With other transports, both groups share one transport.
        """
        transport = self.transport
        if isinstance(transport, GlooTransport):
            transport = type(transport)(transport.group, channel)
        return Group(
            self.name, self.ranks, self.ranks[self.rank], transport, self.ledger, blocking=self.blocking
        )

    def _count(self, op: str, message: Tensor, purpose: str, to: Address = NO_PEER) -> None:
        if self.size > 1:
            payload = message.numel() * message.element_size()
            self.ledger.count(op, self.name, self.size, payload, purpose, to)

    def _issued(self, work: Work, read: Tensor) -> Work:
        work.hold(read)
        if self.blocking:
            work.wait()
        return work

    def all_reduce(self, tensor: Tensor, op: str = SUM, purpose: str = "") -> Work:
        """Reduce `tensor` (contiguous, any shape) in place over the group."""
        self._count("all_reduce", tensor, purpose)
        return self._issued(self.transport.all_reduce(tensor, op), tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, purpose: str = "") -> Work:
        """Sum flat `input` [n * k] over n ranks; `output` [k], the rank's part, may be a view of `input`."""
        assert input.numel() == output.numel() * self.size
        self._count("reduce_scatter", input, purpose)
        return self._issued(self.transport.reduce_scatter(output, input), input)

    def all_gather(self, output: Tensor, input: Tensor, purpose: str = "") -> Work:
        """Concatenate flat `input` [k] of n ranks in `output` [n * k]; `input` may be a part of `output`."""
        assert output.numel() == input.numel() * self.size
        self._count("all_gather", output, purpose)
        return self._issued(self.transport.all_gather(output, input), input)

    def broadcast(self, tensor: Tensor, source: int, purpose: str = "") -> Work:
        """Copy `tensor` in place from the group's rank `source`."""
        self._count("broadcast", tensor, purpose)
        return self.transport.broadcast(tensor, source)

    def send(self, tensor: Tensor, to: int, channel: int, purpose: str = "") -> Work:
        """Send contiguous `tensor` to the group's rank `to`; the tensor must not change until the work is done.

        Messages of one channel between two ranks arrive in the order in which they were sent.
        """
        return self.message(tensor, to, channel, purpose)()

    def message(self, tensor: Tensor, to: int, channel: int, purpose: str = "") -> Callable[[], Work]:
        """Count a `send` now, and return a function that sends the message."""
        self._count("send", tensor, purpose, (to, channel))
        return lambda: self.transport.send(tensor, to, channel).hold(tensor)

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        """Receive the channel's next message from the group's rank `source`; only the sender counts messages."""
        return self.transport.receive(tensor, source, channel)

    def barrier(self) -> None:
        """Block until all ranks of the group have called `barrier`. The ledger does not count barriers."""
        self.transport.barrier()
