"""Every link of a network measured, in both directions, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from repro.config import EmulatedNetwork
from repro.emulate import measure
from repro.emulate.links import End, Links

TOLERANCE = 0.05
"""A link within this fraction of what was asked is right."""
ATTEMPTS = 15
SENDS, RECEIVES = "sends", "receives"
_RANKS: dict[str, Callable[[EmulatedNetwork], int]] = {
    "rank": lambda network: 1,
    "node": lambda network: network.ranks_per_node,
}
"""Ranks that a link of each kind serves."""


class WrongRate(Exception):
    """A link does not carry what was asked; `str` says which, what was asked and what was measured."""


def verify(links: Links) -> dict[str, Any]:
    """Measure all links and hold them to their rates.  Raises `WrongRate`.

    The two ends of a link are measured one at a time, the other left open, or a wrong one could hide behind its
    neighbour; all links of a kind at once, or the machine might carry each alone and not all together.  Then all
    are held, and what the nodes exchange is measured again.
    """
    network = links.network
    found: dict[str, list[float]] = {}
    for kind, rate in (("rank", network.within), ("node", network.between)):
        if rate and network.world > 1:
            for side, ends in ((SENDS, links.sent[kind]), (RECEIVES, links.received[kind])):
                found[f"{kind} {side}"] = _measured(links, kind, side, ends)
    for end in links.ends():
        end.hold()
    if network.between:
        together = min(network.between, network.within * network.ranks_per_node or network.between)
        found["node sends, all held"] = _right(links, "node", f"{SENDS}, all links held,", together)
    trips = {}
    if network.ranks_per_node > 1:
        trips["within"] = measure.round_trip(links, 0, 1)
    if network.nodes > 1:
        trips["between"] = measure.round_trip(links, 0, network.ranks_per_node)
        if trips["between"] < 2 * network.delay_s * (1 - TOLERANCE):
            raise WrongRate(
                f"nodes answer each other in {trips['between']:.2g} s, less than twice {network.delay_s:g} s"
            )
    return {"rates": found, "round_trip_s": trips}


def _measured(links: Links, kind: str, side: str, ends: Sequence[End]) -> list[float]:
    for end in ends:
        end.hold()
    measured = _right(links, kind, side, ends[0].rate)
    for end in ends:
        end.let_go()
    return measured


def _right(links: Links, kind: str, side: str, asked: float) -> list[float]:
    """Bytes/s of every rank, or node, once all are right: what else runs here may disturb a measurement.

    Each rank sends to the next one, or to its like on the next node.
    """
    ranks = _RANKS[kind](links.network)
    count = links.network.world // ranks
    receives = side == RECEIVES
    found = [0.0] * count
    for senders in measure.turns(count):
        flows = [
            (rank, (rank + ranks) % links.network.world) for n in senders for rank in _ranks_of(n, ranks)
        ]
        for _ in range(ATTEMPTS):
            rates = measure.rates(links, flows)
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
