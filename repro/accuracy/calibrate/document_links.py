"""What the ranks measured of their links, as the tables of a system file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repro.accuracy.calibrate.numbers import middle, quantity, rounded
from repro.accuracy.calibrate.spans import BETWEEN, INSIDE, Kind
from repro.measure.statistics import quantile
from repro.parallel.ledger import SEND
from repro.simulate.placement import BETWEEN_NODES


def tables(ranks: Sequence[dict[str, Any]], links: dict[str, Any], together: str) -> dict[str, Any]:
    """The classes of links.  `links`: those inside a node, of which collectives use the first."""
    inside = next(iter(links))
    if "host_copy" in ranks[0] and "pcie" in links:
        speed = ranks[0]["host_copy"]["nbytes"] / middle(rank["host_copy"]["median"] for rank in ranks)
        source = f"measured: pinned host memory to the device, {together}"
        links["pcie"]["bandwidth"] = quantity(speed, source)
    for place, link in ((INSIDE, inside), (BETWEEN, BETWEEN_NODES)):
        found = _collectives(ranks, place)
        if SEND in found:
            links.setdefault(link, {"per": "node", "bandwidth": quantity(None, "to be measured")})
            links[link] |= _link(ranks, place, links[link], found, together)
    return links


def _link(
    ranks: Sequence[dict[str, Any]], place: str, link: dict[str, Any], found: dict[str, Any], together: str
) -> dict[str, Any]:
    """The keys of one class."""
    (smallest, latency), (largest, seconds) = found[SEND]["points"][0], found[SEND]["points"][-1]
    keys: dict[str, Any] = {}
    if link["bandwidth"]["value"] == "unknown":
        senders = 1 if link["per"] == "device" else ranks[0]["per_node"]
        source = f"measured: {largest} bytes from a rank to the next, {together}"
        if place == BETWEEN:
            source = f"measured: {largest} bytes from each of a node's {senders} ranks to the next node"
            keys["efficiency"] = quantity(1, "the bandwidth is itself what messages reach")
        keys["bandwidth"] = quantity(senders * largest / seconds, source)
    keys["latency_s"] = quantity(latency, f"measured: {smallest} bytes from one rank to the next")
    beside = [rank["overlap"][place] for rank in ranks]
    keys["overlap_cost"] = quantity(
        middle(value for rank in beside for value in rank.values()),
        f"measured: products beside {', '.join(beside[0])}, the median of them",
    )
    return keys | {"collectives": found}


def _collectives(ranks: Sequence[dict[str, Any]], place: str) -> dict[str, Any]:
    """Points by operation: of the largest groups of this place, and in `groups` those of the others."""
    found: dict[str, Any] = {}
    for same in zip(*(rank.get("links", ()) for rank in ranks), strict=True):
        row = same[0]
        if row["place"] != place:
            continue
        table: dict[str, Any] = {"points": points([other["points"] for other in same])}
        if row["op"] != SEND:
            table |= _shape(Kind(row["ranks"], row["per_node"], row["stride"]), len(ranks))
        if row["op"] in found:
            found[row["op"]].setdefault("groups", []).append(table)
        else:
            found[row["op"]] = table
    return found


def _shape(kind: Kind, world: int) -> dict[str, int]:
    """What differs from a group of all ranks on one node."""
    shape = {"ranks": kind.ranks} if kind.ranks != world else {}
    shape |= {"per_node": kind.per_node} if kind.per_node != kind.ranks else {}
    return shape | ({"stride": kind.stride} if kind.stride != 1 else {})


def points(by_rank: Sequence[Sequence[Any]]) -> list[list[float]]:
    """(payload, seconds) of the slowest rank.  No payload takes longer than a larger one: what does was disturbed,
    for noise only adds."""
    found = [[same[0][0], max(timing[0] for _, timing in same)] for same in zip(*by_rank, strict=True)]
    least = float("inf")
    for point in reversed(found):
        point[1] = least = min(least, rounded(point[1]))
    return found


def facts(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How far the measurements of collectives scatter, and what each costs products beside it."""
    if "links" not in ranks[0]:
        return {}
    spreads = [
        (high - low) / 2 / median
        for rank in ranks
        for row in rank["links"]
        for _, (median, low, high, _) in row["points"]
    ]
    found = {"spread_of_collectives": rounded(quantile(spreads, 0.5))}
    for place, costs in ranks[0]["overlap"].items():
        name = "overlap_cost" if place == INSIDE else "overlap_cost_between_nodes"
        for op in costs:
            found[f"{name}_{op}"] = rounded(middle(rank["overlap"][place][op] for rank in ranks))
    return found
