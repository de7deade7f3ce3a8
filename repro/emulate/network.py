"""An emulated network: sizes of its frames, and its start and end for a job by a keeper process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from repro.config import EmulatedNetwork
from repro.util.processes import usable_cores

ETHERNET_BYTES = 14
"""Bytes of an Ethernet header, which a token bucket counts."""
HEADER_BYTES = 52
"""Bytes of the IPv4 and TCP headers with a time stamp, which the MTU includes."""
MIN_FRAME_S = 200e-6
"""Minimum seconds of a frame on its link.  A longer frame makes a coarser link."""
MAX_FRAMES_PER_CORE_S = 6000
"""Maximum frames/s, for each core of this machine, of all links of a kind together.  Beyond it a ring takes longer than
its link (docs/windtunnel.md)."""
MIN_MTU, MAX_MTU = 1500, 9000
MAX_SEGMENT_BYTES = 64000
WINDOW_S = 30e-3
"""Seconds of its link that a stream has in flight.  A rank that waits for a core must not stop its link, because links
of a cluster need no core."""
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 1 << 18, 1 << 22


def _frame_bytes(rate: float, links: int) -> float:
    """Return the bytes of a frame on each of `links` links of `rate` bytes/s."""
    return rate * max(MIN_FRAME_S, links / (MAX_FRAMES_PER_CORE_S * usable_cores()))


def mtu_bytes(network: EmulatedNetwork) -> int:
    """Return the bytes of a packet: a frame of the slowest link, within limits."""
    kinds = ((network.between, network.nodes), (network.within, network.world))
    frame = min((_frame_bytes(*kind) for kind in kinds if kind[0]), default=MAX_MTU)
    return round(min(max(frame, MIN_MTU), MAX_MTU))


def segment_bytes(network: EmulatedNetwork) -> int:
    """Return the bytes that a rank's link transmits as one segment; a slower link divides them into packets."""
    frame = _frame_bytes(network.within, network.world) if network.within else MAX_SEGMENT_BYTES
    return round(min(max(frame, mtu_bytes(network)), MAX_SEGMENT_BYTES))


def window_bytes(network: EmulatedNetwork) -> int:
    """Return the maximum bytes that a stream has in flight."""
    fastest = network.within or (network.between if network.ranks_per_node == 1 else math.inf)
    return round(min(max(fastest * WINDOW_S, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES))


def payload_share(network: EmulatedNetwork) -> float:
    """Return the payload's fraction of a link's bytes, for large messages in one direction."""
    return (mtu_bytes(network) - HEADER_BYTES) / (mtu_bytes(network) + ETHERNET_BYTES)


class NoNetwork(Exception):
    """The network cannot be created; `str` is the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """A keeper's description of its network: processes and measurements."""

    keeper: int
    user_namespace: bool
    """Whether the user who made the network is root in a user namespace only."""
    ranks: list[int]
    """Process that holds the namespace, by rank."""
    nodes: list[int]
    """Process that holds the namespace, by node."""
    cores: int
    """Cores that the ranks share."""
    mtu: int
    payload_share: float
    """Payload's fraction of a link's bytes under full load in both directions."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Measured bytes/s of every link by kind and direction."""
    round_trip_s: dict[str, float] = field(default_factory=dict)
    """Seconds of one byte and its answer, `within` a node and `between` nodes, in the kernel alone."""

    def exec_command(self, rank: int, command: list[str]) -> list[str]:
        """Return the command line that runs `command` in the namespace of `rank`."""
        inside = ["--user", "--preserve-credentials"] if self.user_namespace else []
        return ["nsenter", "--target", str(self.ranks[rank]), "--net", *inside, "--", *command]


class RunningNetwork:
    """A created and verified network; close it in the end."""

    def __init__(self, network: EmulatedNetwork):
        """Create and verify the network.  Raises `NoNetwork`.  The calling thread must live as long as the network."""
        self.network = network
        self._keeper = start_keeper("--parent", str(os.getpid()))
        try:
            self.facts = request_network(self._keeper, network)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the network."""
        self._keeper.kill()
        self._keeper.wait()
        for stream in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def start_keeper(*arguments: str) -> subprocess.Popen[str]:
    """Start a keeper that waits for a request."""
    return subprocess.Popen(
        [sys.executable, "-m", "repro.emulate.keeper", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def request_network(keeper: subprocess.Popen[str], network: EmulatedNetwork) -> NetworkFacts:
    """Request a network from a keeper, and return its description.  Raises `NoNetwork`."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.write(json.dumps(asdict(network)) + "\n")
        keeper.stdin.flush()
    line = keeper.stdout.readline()
    if not line:
        lines = keeper.stderr.read().strip().splitlines()
        reason = lines[-1] if lines else "its keeper died"
        raise NoNetwork(f"the emulated network could not be made: {reason}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise NoNetwork(f"emulated network {network}: {answer['error']}")
    return NetworkFacts(**answer)
