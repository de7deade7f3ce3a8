"""Groups of ranks: every collective and message of the suite passes through a `Group`, which counts calls and bytes.

`repro.parallel.transports.Transport` transmits the tensors. No other module of `repro.parallel` starts collectives.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from repro.parallel.ledger import NO_PEER, Address, CommLedger
from repro.parallel.transports import MAX, SUM, GlooTransport, NoTransport, Transport, Work

__all__ = ["MAX", "SUM", "Group", "Work"]


class Group:
    """Ordered set of ranks that communicate. Each process of the set has its own object, which contains its `rank`."""

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
        """Create the group's object for `rank`. `blocking`: wait for every collective at its launch (no overlap)."""
        self.name, self.ranks, self.size, self.blocking = name, ranks, len(ranks), blocking
        self.rank = ranks.index(rank)
        """Index of this process among the ranks of the group."""
        self.transport: Transport = transport if self.size > 1 else NoTransport()
        self.ledger = ledger

    def __repr__(self) -> str:
        return f"Group({self.name}: rank {self.rank} of {self.size})"

    def on_channel(self, channel: int) -> Group:
        """Return a copy of the group whose collectives never match collectives that use another channel number.

        Only the gloo transport separates channels. With other transports, the copy shares the group's transport.
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
        """All-reduce `tensor` (contiguous, any shape) in place over the ranks of the group."""
        self._count("all_reduce", tensor, purpose)
        return self._issued(self.transport.all_reduce(tensor, op), tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, purpose: str = "") -> Work:
        """Reduce-scatter flat `input` [n * k] of n ranks to `output` [k], which may be a view of `input`."""
        assert input.numel() == output.numel() * self.size
        self._count("reduce_scatter", input, purpose)
        return self._issued(self.transport.reduce_scatter(output, input), input)

    def all_gather(self, output: Tensor, input: Tensor, purpose: str = "") -> Work:
        """All-gather flat `input` [k] of n ranks to `output` [n * k]; `input` may be a view of `output`."""
        assert output.numel() == input.numel() * self.size
        self._count("all_gather", output, purpose)
        return self._issued(self.transport.all_gather(output, input), input)

    def broadcast(self, tensor: Tensor, source: int, purpose: str = "") -> Work:
        """Broadcast `tensor` in place from the group's rank `source` to all ranks of the group."""
        self._count("broadcast", tensor, purpose)
        return self.transport.broadcast(tensor, source)

    def send(self, tensor: Tensor, to: int, channel: int, purpose: str = "") -> Work:
        """Send contiguous `tensor` to the group's rank `to`. The tensor must not change before `Work.wait` returns.

        Messages of one channel between two ranks arrive in the order in which they were sent.
        """
        return self.message(tensor, to, channel, purpose)()

    def message(self, tensor: Tensor, to: int, channel: int, purpose: str = "") -> Callable[[], Work]:
        """Add a message to the counters of communication, and return a function that sends the message."""
        self._count("send", tensor, purpose, (to, channel))
        return lambda: self.transport.send(tensor, to, channel).hold(tensor)

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        """Receive the next message of a channel from the group's rank `source` into `tensor`."""
        return self.transport.receive(tensor, source, channel)

    def barrier(self) -> None:
        """Block until all ranks of the group have called `barrier`, which the communication ledger does not count."""
        self.transport.barrier()
