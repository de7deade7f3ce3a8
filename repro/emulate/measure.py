"""What links really carry: what ranks receive while all send to each other."""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from repro.emulate.frames import payload_share
from repro.emulate.links import Links, address

RAMP_S, WINDOW_S = 0.03, 0.12
TURN_S = 1e-3
"""How often each stream is filled and emptied."""
CHUNK = memoryview(bytes(1 << 18))
PINGS = 40


@contextmanager
def _connection(links: Links, source: int, target: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A stream from one rank to another; both ends are in this process."""
    with ExitStack() as stack:
        with links.ranks[target].namespace.inside():
            listener = stack.enter_context(socket.create_server((address(links.network, target), 0)))
        with links.ranks[source].namespace.inside():
            sender = stack.enter_context(socket.socket())
        sender.settimeout(5)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        stack.enter_context(receiver)
        for end in (sender, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # what waits is not sent
        yield sender, receiver


def rates(links: Links, flows: Sequence[tuple[int, int]]) -> list[float]:
    """Bytes/s on the wire of each flow (from rank, to rank) while all send what they can."""
    sink = bytearray(1 << 22)
    received = [0] * len(flows)
    with ExitStack() as stack:
        streams = [stack.enter_context(_connection(links, *flow)) for flow in flows]
        for sender, receiver in streams:
            sender.setblocking(False)
            receiver.setblocking(False)

        def pump(seconds: float) -> float:
            """Send and receive for so long; when it ended."""
            end = time.perf_counter() + seconds
            while (now := time.perf_counter()) < end:
                for number, (sender, receiver) in enumerate(streams):
                    with suppress(BlockingIOError):
                        while sender.send(CHUNK) == len(CHUNK):
                            pass
                    with suppress(BlockingIOError):
                        received[number] += receiver.recv_into(sink)
                time.sleep(max(0.0, now + TURN_S - time.perf_counter()))
            return time.perf_counter()

        began = pump(RAMP_S)
        before = list(received)
        spent = pump(WINDOW_S) - began
    share = payload_share(links.network)
    return [(b - a) / spent / share for a, b in zip(before, received, strict=True)]


def turns(count: int) -> list[list[int]]:
    """Who of so many in a ring sends to the next one, in turns in which nobody both sends and receives.

    Acknowledgements that wait behind data of the other direction would make a link look slower than it is.
    """
    odd = count % 2
    found = [list(range(0, count - odd, 2)), list(range(1, count, 2)), [count - 1] if odd else []]
    return [senders for senders in found if senders]


def round_trip(links: Links, source: int, target: int) -> float:
    """Seconds of one byte there and one back, the middle of some."""
    with _connection(links, source, target) as (there, back):
        seconds = []
        for _ in range(PINGS):
            began = time.perf_counter()
            there.send(b"?")
            back.recv(1)
            back.send(b"!")
            there.recv(1)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
