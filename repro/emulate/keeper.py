"""The keeper of an emulated network: the process that makes the network, measures its links and holds it.

The keeper is `python -m repro.emulate.keeper --parent PID`.  One line of JSON on its standard input asks for a network.
One line of JSON on its standard output describes the network or the error.  The keeper ends when its input ends or its
parent dies, and the kernel removes namespaces without a holder.

Before the network is used, every link is measured in both directions.  `verify` compares the bytes/s that ranks
receive, while all of them send, with the requested rates.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from repro.config import EmulatedNetwork
from repro.config.errors import require
from repro.emulate.links import Links, address, become_root
from repro.emulate.network import mtu_bytes, payload_share
from repro.util.processes import die_with_parent, usable_cores

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
                for end in ends:
                    end.limit_rate()
                found[f"{kind} {side}"] = _measure_until_right(links, kind, side, ends[0].rate)
                for end in ends:
                    end.remove_limit()
    for end in links.ends():
        end.limit_rate()
    if network.between:
        together = min(network.between, network.within * network.ranks_per_node or network.between)
        side = f"{SENDS}, all links held,"
        found["node sends, all held"] = _measure_until_right(links, "node", side, together)
    trips = {}
    if network.ranks_per_node > 1:
        trips["within"] = round_trip_s(links, 0, 1)
    if network.nodes > 1:
        trips["between"] = round_trip_s(links, 0, network.ranks_per_node)
        if (trip_s := trips["between"]) < 2 * network.delay_s * (1 - TOLERANCE):
            least = f"twice {network.delay_s:g} s"
            raise WrongRate(f"nodes answer each other in {trip_s:.2g} s, less than {least}")
    return {"rates": found, "round_trip_s": trips}


def _measure_until_right(links: Links, kind: str, side: str, asked: float) -> list[float]:
    """Return the bytes/s of every rank, or node.  Raises `WrongRate` if a rate is wrong in every attempt.

    Each rank sends to the next rank, or to its counterpart on the next node.  Other programs may disturb an attempt.
    """
    network, receives = links.network, side == RECEIVES
    ranks = network.ranks_per_node if kind == "node" else 1  # that share a link
    count = network.world // ranks
    found = [0.0] * count
    for senders in turns(count):
        sources = [rank for n in senders for rank in range(n * ranks, (n + 1) * ranks)]
        flows = [(rank, (rank + ranks) % network.world) for rank in sources]
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
        drop_unsent = struct.pack("ii", 1, 0)
        for end in (sender, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, drop_unsent)
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


def main() -> int:
    """Make the requested network as a keeper, report it, and wait for the end."""
    parser = argparse.ArgumentParser(prog="python -m repro.emulate.keeper", description=__doc__)
    parser.add_argument("--parent", type=int, default=0, help="process to die with; 0: none")
    parser.add_argument("--stay", action="store_true", help="stay when the input ends")
    options = parser.parse_args()
    die_with_parent(options.parent)
    network = EmulatedNetwork(**json.loads(sys.stdin.readline()))
    try:
        answer = _make_network(network)
    except Exception as error:  # the requester reports the error; the keeper has no other reader
        answer = {"error": " ".join(str(error).split()) or type(error).__name__}
    print(json.dumps(answer), flush=True)
    if "error" in answer:
        return 1
    while options.stay:
        signal.pause()
    while sys.stdin.readline():
        pass
    return 0


def _make_network(network: EmulatedNetwork) -> dict[str, Any]:
    """Make and verify a network in this process, and return its description as plain JSON data."""
    for key in ("between", "within"):
        rate = getattr(network, key)
        require(rate < 2**32, key, rate, "less than the 2**32 that a bucket can count")
    mapped = become_root()
    made = Links(network)
    return {
        "keeper": os.getpid(),
        "user_namespace": mapped,
        "ranks": [rank.namespace.holder for rank in made.ranks],
        "nodes": [node.namespace.holder for node in made.nodes],
        "cores": usable_cores(),
        "mtu": mtu_bytes(network),
        "payload_share": payload_share(network),
        **verify(made),
    }


if __name__ == "__main__":
    sys.exit(main())
