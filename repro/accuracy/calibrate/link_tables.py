"""Tables of links in a system file, from the ranks' measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from repro.accuracy.calibrate.fit import quantity, round_digits
from repro.accuracy.calibrate.plan import BETWEEN, INSIDE, GroupKind
from repro.parallel.ledger import SEND
from repro.simulate.placement import BETWEEN_NODES


def link_tables(ranks: Sequence[dict[str, Any]], links: dict[str, Any], together: str) -> dict[str, Any]:
    """Return the tables of all links. `links` are the links inside a node; collectives use the first one."""
    inside = next(iter(links))
    if "host_copy" in ranks[0] and "pcie" in links:
        speed = ranks[0]["host_copy"]["nbytes"] / statistics.median(
            rank["host_copy"]["median"] for rank in ranks
        )
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
    """Return the keys of one link."""
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
    costs = [rank["overlap"][place] for rank in ranks]
    keys["overlap_cost"] = quantity(
        statistics.median(value for rank in costs for value in rank.values()),
        f"measured: median slowdown of matrix products during {', '.join(costs[0])}",
    )
    return keys | {"collectives": found}


def _collectives(ranks: Sequence[dict[str, Any]], place: str) -> dict[str, Any]:
    """Return the points of each operation in the largest group of a place, and in `groups` the points of the others."""
    found: dict[str, Any] = {}
    for same in zip(*(rank.get("links", ()) for rank in ranks), strict=True):
        row = same[0]
        if row["place"] != place:
            continue
        table: dict[str, Any] = {"points": collective_points([other["points"] for other in same])}
        if row["op"] != SEND:
            table |= _group_keys(GroupKind(row["ranks"], row["per_node"], row["stride"]), len(ranks))
        if row["op"] in found:
            found[row["op"]].setdefault("groups", []).append(table)
        else:
            found[row["op"]] = table
    return found


def _group_keys(kind: GroupKind, world: int) -> dict[str, int]:
    """Return the keys in which a group differs from all ranks on one node."""
    shape = {"ranks": kind.ranks} if kind.ranks != world else {}
    shape |= {"per_node": kind.per_node} if kind.per_node != kind.ranks else {}
    return shape | ({"stride": kind.stride} if kind.stride != 1 else {})


def collective_points(by_rank: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Return (payload, seconds) of the slowest rank.

    Noise only adds time, so the seconds of a payload are limited to the seconds of the next larger payload.
    """
    found = [[same[0][0], max(timing[0] for _, timing in same)] for same in zip(*by_rank, strict=True)]
    limit = float("inf")
    for point in reversed(found):
        point[1] = limit = min(limit, round_digits(point[1]))
    return found


def link_facts(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the spread of the collectives' timings, and the overlap cost of each collective."""
    if "links" not in ranks[0]:
        return {}
    spreads = [
        (high - low) / 2 / median
        for rank in ranks
        for row in rank["links"]
        for _, (median, low, high, _) in row["points"]
    ]
    found = {"spread_of_collectives": round_digits(statistics.median(spreads))}
    for place, costs in ranks[0]["overlap"].items():
        name = "overlap_cost" if place == INSIDE else "overlap_cost_between_nodes"
        for op in costs:
            found[f"{name}_{op}"] = round_digits(
                statistics.median(rank["overlap"][place][op] for rank in ranks)
            )
    return found
