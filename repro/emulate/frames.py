"""How large the frames on the links of an emulated network are, and what part of them is payload.

Arithmetic alone, for whoever predicts what such a network brings as well as for who makes it.
"""

from __future__ import annotations

import math

from repro.config import EmulatedNetwork
from repro.util.processes import usable_cores

ETHERNET, HEADERS = 14, 52
"""Bytes of an Ethernet header, which a token bucket counts; of IPv4 and TCP with a time stamp, within the MTU."""
FRAME_S, FRAMES = 200e-6, 6000
"""What a frame lasts on its link, at least: longer ones make a coarse link.  Frames/s for each core of this machine
that all links of a kind carry together, at most: with more a ring takes longer than its link (docs/windtunnel.md)."""
LEAST_MTU, MOST_MTU, MOST_PIECE = 1500, 9000, 64000
WINDOW_S, LEAST_WINDOW, MOST_WINDOW = 30e-3, 1 << 18, 1 << 22
"""What a stream has under way: seconds of its link, and bounds in bytes.  A rank that has no core for a while must
not hold up its link, which on a cluster needs none."""


def _frame(rate: float, links: int) -> float:
    """Bytes of a frame on each of so many links."""
    return rate * max(FRAME_S, links / (FRAMES * usable_cores()))


def mtu(network: EmulatedNetwork) -> int:
    """Bytes of a packet: a frame of the slowest link, within limits."""
    kinds = ((network.between, network.nodes), (network.within, network.world))
    frame = min((_frame(*kind) for kind in kinds if kind[0]), default=MOST_MTU)
    return round(min(max(frame, LEAST_MTU), MOST_MTU))


def piece(network: EmulatedNetwork) -> int:
    """Bytes that a rank's link carries as one; a slower link behind it divides them into packets."""
    frame = _frame(network.within, network.world) if network.within else MOST_PIECE
    return round(min(max(frame, mtu(network)), MOST_PIECE))


def window(network: EmulatedNetwork) -> int:
    """Bytes that a stream has under way at most."""
    fastest = network.within or (network.between if network.ranks_per_node == 1 else math.inf)
    return round(min(max(fastest * WINDOW_S, LEAST_WINDOW), MOST_WINDOW))


def payload_share(network: EmulatedNetwork) -> float:
    """Fraction of a link's bytes that is payload, in large messages that only acknowledgements come back for."""
    return (mtu(network) - HEADERS) / (mtu(network) + ETHERNET)
