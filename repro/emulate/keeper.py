"""The process that creates an emulated network, measures every link in both directions, and owns the namespaces.

`python -m repro.emulate.keeper --parent PID` reads the network from standard input and writes its description, or the
error, to standard output, each as one line of JSON.  When this process ends, the kernel removes the network.
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
"""Warm-up time of the test streams before link rates are measured, and duration of the measurement, in seconds."""
TURN_S = 1e-3
"""Interval in seconds at which a measurement of link rates writes to and reads from its sockets."""
CHUNK = memoryview(bytes(1 << 18))
PINGS = 40
"""Number of one-byte round trips per latency measurement, whose result is their median."""
TOLERANCE = 0.05
"""Maximum relative difference between the measured and the requested rate of a link."""
ATTEMPTS = 15
"""Maximum number of measurements of a link's rate.  Repetitions are needed, because other programs disturb them."""
SENDS, RECEIVES = "sends", "receives"


class WrongRate(Exception):
    """The measured rate or delay of an emulated link differs from the requested value; `str` gives both values."""


def verify(links: Links) -> dict[str, Any]:
    """Limit all links to their requested rates, and return measured bytes/s and round trips.  Raises `WrongRate`.

    The two ends of a link are measured one at a time with the other end unlimited, so that neither end hides an error
    of the other.  All links of ranks, or of nodes, are measured at once, since an experiment uses them at once.  When
    all links are limited, the rates between nodes are measured again.
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
        side = f"{SENDS}, with all links limited,"
        found["node sends, all held"] = _measure_until_right(links, "node", side, together)
    trips = {}
    if network.ranks_per_node > 1:
        trips["within"] = round_trip_s(links, 0, 1)
    if network.nodes > 1:
        trips["between"] = round_trip_s(links, 0, network.ranks_per_node)
        if (trip_s := trips["between"]) < 2 * network.delay_s * (1 - TOLERANCE):
            least = f"twice the requested delay of {network.delay_s:g} s (delay_s)"
            raise WrongRate(f"the round trip between nodes takes {trip_s:.2g} s, less than {least}")
    return {"rates": found, "round_trip_s": trips}


def _measure_until_right(links: Links, kind: str, side: str, rate: float) -> list[float]:
    """Return the measured bytes/s of the link of every rank, or node (`kind`).

    Each rank sends to the next rank, or to its counterpart on the next node.  Raises `WrongRate` if the rate of a link
    differs from `rate` in every attempt.
    """
    network, receives = links.network, side == RECEIVES
    ranks = network.ranks_per_node if kind == "node" else 1
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
            number = max(((n + receives) % count for n in senders), key=lambda n: abs(found[n] - rate))
            if abs(found[number] - rate) <= TOLERANCE * rate:
                break
        else:
            raise WrongRate(
                f"{kind} {number} {side} {found[number] / 1e6:.3g} MB/s on its link instead of {rate / 1e6:.3g} MB/s: "
                f"{ATTEMPTS} measurements differ by more than {TOLERANCE:.0%}"
            )
    return found


@contextmanager
def _connection(links: Links, source: int, target: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a TCP stream from rank `source` to rank `target`, with both sockets in this process."""
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
    """Return the bytes/s, with headers, of each flow (sending rank, receiving rank) while all flows send at once."""
    sink = bytearray(1 << 22)
    received = [0] * len(flows)
    with ExitStack() as stack:
        streams = [stack.enter_context(_connection(links, *flow)) for flow in flows]
        for sender, receiver in streams:
            sender.setblocking(False)
            receiver.setblocking(False)

        def pump(seconds: float) -> float:
            """Send and receive on all streams for `seconds`, and return the time at the end."""
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
    """Divide the `count` members of a ring into groups that send in turn, so that no member sends and receives at once.

    Acknowledgements that wait behind data of the other direction would lower the measured rate of a link.
    """
    odd = count % 2
    found = [list(range(0, count - odd, 2)), list(range(1, count, 2)), [count - 1] if odd else []]
    return [senders for senders in found if senders]


def round_trip_s(links: Links, source: int, target: int) -> float:
    """Return the median time in seconds in which rank `source` sends one byte to `target` and receives one byte."""
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
    """Create the network that standard input requests, print its description, and wait until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m repro.emulate.keeper", description=__doc__)
    parser.add_argument("--parent", type=int, default=0, help="pid whose exit ends the network; 0: none")
    parser.add_argument("--stay", action="store_true", help="run on after standard input closes")
    options = parser.parse_args()
    die_with_parent(options.parent)
    network = EmulatedNetwork(**json.loads(sys.stdin.readline()))
    try:
        answer = _make_network(network)
    except Exception as error:  # The parent process, which requested the emulated network, prints the error.
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
    """Create an emulated network, verify its link rates, and return the fields of `NetworkFacts` as JSON data."""
    for key in ("between", "within"):
        rate = getattr(network, key)
        require(rate < 2**32, key, rate, "less than 2**32 bytes/s, the limit of the Linux filter tc-tbf")
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
