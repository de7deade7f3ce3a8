"""Start and end of an emulated network for a job, and the sizes of its packets, segments and TCP windows."""

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
"""Bytes of an Ethernet header, which a token bucket counts in addition to the packet."""
HEADER_BYTES = 52
"""Bytes of the IPv4 and TCP headers with a time stamp, which the MTU includes."""
MIN_FRAME_S = 200e-6
"""Minimum transmission time of a frame on a link of an emulated network, in seconds."""
MAX_FRAMES_PER_CORE_S = 6000
"""Maximum frames/s of an emulated network per core of this machine, summed over the links of all ranks or all nodes.

At higher frame rates the processors, not the links, limit a ring collective (docs/windtunnel.md).
"""
MIN_MTU, MAX_MTU = 1500, 9000
MAX_SEGMENT_BYTES = 64000
WINDOW_S = 30e-3
"""Time in seconds in which a link of an emulated network transmits one TCP window.

While a rank waits for a core, its link must continue to transmit, because links of a cluster need no core.
"""
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 1 << 18, 1 << 22


def _frame_bytes(rate: float, links: int) -> float:
    """Return the minimum frame size in bytes at which this machine can emulate `links` links of `rate` bytes/s."""
    return rate * max(MIN_FRAME_S, links / (MAX_FRAMES_PER_CORE_S * usable_cores()))


def mtu_bytes(network: EmulatedNetwork) -> int:
    """Return the MTU of an emulated network in bytes: the smallest frame of its links, limited to a valid range."""
    kinds = ((network.between, network.nodes), (network.within, network.world))
    frame = min((_frame_bytes(*kind) for kind in kinds if kind[0]), default=MAX_MTU)
    return round(min(max(frame, MIN_MTU), MAX_MTU))


def segment_bytes(network: EmulatedNetwork) -> int:
    """Return the TCP segment size in bytes. A rank's link sends a segment as one frame; slower links split segments."""
    frame = _frame_bytes(network.within, network.world) if network.within else MAX_SEGMENT_BYTES
    return round(min(max(frame, mtu_bytes(network)), MAX_SEGMENT_BYTES))


def window_bytes(network: EmulatedNetwork) -> int:
    """Return the TCP window of an emulated network in bytes: the maximum number of a stream's bytes in flight."""
    fastest = network.within or (network.between if network.ranks_per_node == 1 else math.inf)
    return round(min(max(fastest * WINDOW_S, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES))


def payload_share(network: EmulatedNetwork) -> float:
    """Return the message bytes as a fraction of the bytes on a link, for large messages in one direction."""
    return (mtu_bytes(network) - HEADER_BYTES) / (mtu_bytes(network) + ETHERNET_BYTES)


class NoNetwork(Exception):
    """An emulated network cannot be created; `str` is the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """Processes, packet sizes and measurements of a running emulated network."""

    keeper: int
    """Id of the process that owns the network (`repro.emulate.keeper`)."""
    user_namespace: bool
    """Whether the network is in a user namespace, because its creator is not root on this machine."""
    ranks: list[int]
    """Id of the process in each rank's network namespace, by rank."""
    nodes: list[int]
    """Id of the process in each node's network namespace, by node."""
    cores: int
    """Number of processor cores that all ranks of the emulated network share."""
    mtu: int
    payload_share: float
    """Message bytes as a fraction of the bytes on a link, which include packet headers."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Measured bytes/s of each rank's and each node's link, by kind and direction such as `node sends`."""
    round_trip_s: dict[str, float] = field(default_factory=dict)
    """Median round trip of one byte in seconds, `within` a node and `between` nodes."""

    def exec_command(self, rank: int, command: list[str]) -> list[str]:
        """Return the command line that runs `command` in the network namespace of `rank`."""
        inside = ["--user", "--preserve-credentials"] if self.user_namespace else []
        return ["nsenter", "--target", str(self.ranks[rank]), "--net", *inside, "--", *command]


class RunningNetwork:
    """An emulated network with verified link rates, which runs until `close`."""

    def __init__(self, network: EmulatedNetwork):
        """Create an emulated network, which ends with the calling thread, and verify its link rates.

        Raises `NoNetwork`.
        """
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
    """Start the process that will own an emulated network; the process waits for `request_network`."""
    return subprocess.Popen(
        [sys.executable, "-m", "repro.emulate.keeper", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def request_network(keeper: subprocess.Popen[str], network: EmulatedNetwork) -> NetworkFacts:
    """Let the process of `start_keeper` create a network, and return its description.  Raises `NoNetwork`."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.write(json.dumps(asdict(network)) + "\n")
        keeper.stdin.flush()
    line = keeper.stdout.readline()
    if not line:
        lines = keeper.stderr.read().strip().splitlines()
        reason = lines[-1] if lines else "the process that creates the network was killed"
        raise NoNetwork(f"the emulated network could not be created: {reason}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise NoNetwork(f"emulated network {network}: {answer['error']}")
    return NetworkFacts(**answer)
