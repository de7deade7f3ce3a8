"""Measurement of every link of an emulated network, in both directions, before the network is used.

`verify` compares the bytes/s that ranks receive, while all of them send, with the requested rates.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from repro.config import EmulatedNetwork
from repro.emulate.links import End, Links, address
from repro.emulate.network import payload_share

RAMP_S, WINDOW_S = 0.03, 0.12
"""Seconds before a measurement, and seconds of the measurement."""
TURN_S = 1e-3
"""Seconds between two turns in which each stream is filled and emptied."""
CHUNK = memoryview(bytes(1 << 18))
PINGS = 40
TOLERANCE = 0.05
"""Maximum relative difference between the measured and the requested rate of a link."""
ATTEMPTS = 15
SENDS, RECEIVES = "sends", "receives"
_RANKS: dict[str, Callable[[EmulatedNetwork], int]] = {
    "rank": lambda network: 1,
    "node": lambda network: network.ranks_per_node,
}
"""Number of ranks that a link of each kind serves."""


class WrongRate(Exception):
    """A link does not have the requested rate; `str` names the link and both rates."""


def verify(links: Links) -> dict[str, Any]:
    """Measure all links, limit them to their rates, and return the measurements.  Raises `WrongRate`.

    The two ends of a link are measured one at a time with the other end unlimited, so that neither end hides an error
    of the other.  All links of a kind are measured at once, since the machine must run all of them together.  After
    that all links are limited, and the rates between nodes are measured again.
    """
    network = links.network
    found: dict[str, list[float]] = {}
    for kind, rate in (("rank", network.within), ("node", network.between)):
        if rate and network.world > 1:
            for side, ends in ((SENDS, links.sent[kind]), (RECEIVES, links.received[kind])):
                found[f"{kind} {side}"] = _measure_side(links, kind, side, ends)
    for end in links.ends():
        end.limit_rate()
    if network.between:
        together = min(network.between, network.within * network.ranks_per_node or network.between)
        found["node sends, all held"] = _measure_until_right(
            links, "node", f"{SENDS}, all links held,", together
        )
    trips = {}
    if network.ranks_per_node > 1:
        trips["within"] = round_trip_s(links, 0, 1)
    if network.nodes > 1:
        trips["between"] = round_trip_s(links, 0, network.ranks_per_node)
        if trips["between"] < 2 * network.delay_s * (1 - TOLERANCE):
            raise WrongRate(
                f"nodes answer each other in {trips['between']:.2g} s, less than twice {network.delay_s:g} s"
            )
    return {"rates": found, "round_trip_s": trips}


def _measure_side(links: Links, kind: str, side: str, ends: Sequence[End]) -> list[float]:
    for end in ends:
        end.limit_rate()
    measured = _measure_until_right(links, kind, side, ends[0].rate)
    for end in ends:
        end.remove_limit()
    return measured


def _measure_until_right(links: Links, kind: str, side: str, asked: float) -> list[float]:
    """Return the bytes/s of every rank, or node.  Raises `WrongRate` if a rate is wrong in every attempt.

    Each rank sends to the next rank, or to its counterpart on the next node.  Other programs may disturb an attempt.
    """
    ranks = _RANKS[kind](links.network)
    count = links.network.world // ranks
    receives = side == RECEIVES
    found = [0.0] * count
    for senders in turns(count):
        flows = [
            (rank, (rank + ranks) % links.network.world) for n in senders for rank in _ranks_of(n, ranks)
        ]
        for _ in range(ATTEMPTS):
            rates = flow_rates(links, flows)
            for place, sender in enumerate(senders):
                number = (sender + 1) % count if receives else sender
                found[number] = sum(rates[place * ranks : (place + 1) * ranks])
            number = max(((n + receives) % count for n in senders), key=lambda n: abs(found[n] - asked))
            if abs(found[number] - asked) <= TOLERANCE * asked:
                break
        else:
            raise WrongRate(
                f"{kind} {number} {side} {found[number] / 1e6:.3g} MB/s on its link and not {asked / 1e6:.3g} MB/s, "
                f"as asked: more than {TOLERANCE:.0%} off, {ATTEMPTS} times"
            )
    return found


def _ranks_of(number: int, ranks: int) -> range:
    return range(number * ranks, (number + 1) * ranks)


@contextmanager
def _connection(links: Links, source: int, target: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a stream from one rank to another, with both ends in this process."""
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
            )  # unsent data is dropped
        yield sender, receiver


def flow_rates(links: Links, flows: Sequence[tuple[int, int]]) -> list[float]:
    """Return the bytes/s on the wire of each flow (from rank, to rank) while all ranks send at full speed."""
    sink = bytearray(1 << 22)
    received = [0] * len(flows)
    with ExitStack() as stack:
        streams = [stack.enter_context(_connection(links, *flow)) for flow in flows]
        for sender, receiver in streams:
            sender.setblocking(False)
            receiver.setblocking(False)

        def pump(seconds: float) -> float:
            """Send and receive for `seconds`, and return the time at the end."""
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
    """Return the senders of each turn in a ring of `count` members, such that no member both sends and receives.

    Acknowledgements that wait behind data of the other direction would lower the measured rate of a link.
    """
    odd = count % 2
    found = [list(range(0, count - odd, 2)), list(range(1, count, 2)), [count - 1] if odd else []]
    return [senders for senders in found if senders]


def round_trip_s(links: Links, source: int, target: int) -> float:
    """Return the median seconds of one byte and its answer."""
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
