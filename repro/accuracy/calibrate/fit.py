"""Operator rates and link tables of a calibrated system file, fitted to the measurements of all ranks.

The seconds of an operator call are fixed + bytes * per_byte + flops * per_flop with non-negative coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from repro.accuracy.calibrate.plan import BETWEEN, INSIDE, GroupKind
from repro.config.timing import UNALIGNED_MATMUL, OperatorRate
from repro.parallel.ledger import SEND
from repro.simulate.placement import BETWEEN_NODES
from repro.simulate.time.device import MATMULS

MATMUL, ELEMENTWISE = "matmul", "elementwise"
MIN_SIZE_RATIO = 8.0
"""Minimum size ratio of an operator's largest to its smallest measured call for fitting a separate slope."""
MIN_SIZES = 3
"""Minimum number of different measured sizes of an operator for fitting a separate slope (time per byte or FLOP)."""
MAX_COMMON_RATE_ERROR = 0.1
"""Maximum median relative error at which an operator uses the rate that all operators of its kind have in common."""


class TimedCall(NamedTuple):
    """One measured call of an operator."""

    nbytes: float
    """Number of bytes that the call reads and writes, as a trace counts them."""
    flops: float
    seconds: float


def fit_rate(points: Sequence[TimedCall]) -> OperatorRate:
    """Return the operator rate with the least sum of squared relative errors at the measured calls.

    The method is non-negative least squares (Lawson and Hanson 1974); relative errors weight short and long calls
    equally.
    """
    import numpy as np
    from scipy.optimize import nnls

    assert points
    assert all(point.seconds > 0 for point in points)
    columns = np.array([[1.0, point.nbytes, point.flops] for point in points])
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    seconds = np.array([point.seconds for point in points])
    solution, _ = nnls(columns / scale / seconds[:, None], np.ones(len(points)))
    fixed, per_byte, per_flop = (solution / scale).tolist()
    return OperatorRate(fixed_s=fixed, per_byte_s=per_byte, per_flop_s=per_flop)


def relative_errors(rate: OperatorRate, points: Sequence[TimedCall]) -> list[float]:
    """Return the relative error of an operator rate at each measured call, predicted / measured - 1."""
    return [rate.seconds(flops=point.flops, nbytes=point.nbytes) / point.seconds - 1 for point in points]


def median_error(rate: OperatorRate, points: Sequence[TimedCall]) -> float:
    """Return the median absolute relative error of an operator rate at the measured calls."""
    return median(map(abs, relative_errors(rate, points)))


def operator_rates(points: Mapping[str, Sequence[TimedCall]]) -> dict[str, OperatorRate]:
    """Return the common operator rates, and separate rates of operators that deviate from them, by name.

    The common rates are `matmul`, `elementwise`, and `unaligned_matmul` (sizes not divisible by 8) if measured.
    """
    pools: dict[str, list[TimedCall]] = {MATMUL: [], ELEMENTWISE: [], UNALIGNED_MATMUL: []}
    pools[UNALIGNED_MATMUL] += points.get(UNALIGNED_MATMUL, [])
    for name, found in points.items():
        if name in MATMULS:
            pools[MATMUL] += found
        elif name.startswith("aten."):
            pools[ELEMENTWISE] += [point for point in found if not point.flops]
    common = {name: fit_rate(found) for name, found in pools.items() if found}
    own = {}
    for name, found in sorted(points.items()):
        if name == UNALIGNED_MATMUL:
            continue
        shared = common.get(MATMUL if name in MATMULS else ELEMENTWISE)
        if shared is None:
            own[name] = fit_rate(found)
        elif median_error(shared, found) > MAX_COMMON_RATE_ERROR:
            own[name] = fit_rate(found) if has_size_range(found) else scale_rate(shared, found)
    return common | own


def scale_rate(common: OperatorRate, points: Sequence[TimedCall]) -> OperatorRate:
    """Return `common` with the larger of its fixed time and its time for bytes and FLOP refitted to one operator."""
    work = [common.seconds(flops=point.flops, nbytes=point.nbytes) - common.fixed_s for point in points]
    if median(work) < common.fixed_s:
        calls = [point.seconds - seconds for point, seconds in zip(points, work, strict=True)]
        return replace(common, fixed_s=max(0.0, median(calls)))
    times = [
        (point.seconds - common.fixed_s) / seconds
        for point, seconds in zip(points, work, strict=True)
        if seconds and seconds >= common.fixed_s  # skip small calls, in which the fixed time dominates
    ]
    factor = max(0.0, median(times))
    return replace(common, per_byte_s=factor * common.per_byte_s, per_flop_s=factor * common.per_flop_s)


def rate_of(known: Mapping[str, OperatorRate], name: str) -> OperatorRate:
    """Return the separate rate of an operator or, without one, the common rate for its kind."""
    return known.get(name) or known[MATMUL if name in MATMULS else ELEMENTWISE]


def has_size_range(points: Sequence[TimedCall]) -> bool:
    """Return whether the sizes of an operator's measured calls differ enough for fitting a slope."""
    sizes = [max(1.0, point.nbytes) for point in points]
    return len(set(sizes)) >= MIN_SIZES and max(sizes) / min(sizes) >= MIN_SIZE_RATIO


def quantity(value: float | None, source: str) -> dict[str, Any]:
    """Return a number and its source as a table of a system file; None becomes `unknown`."""
    return {"value": "unknown" if value is None else round_digits(value), "source": source}


def round_digits(value: float) -> float:
    """Round a measurement to five significant digits; integers stay exact."""
    return value if isinstance(value, int) else float(f"{value:.5g}")


def link_tables(ranks: Sequence[dict[str, Any]], links: dict[str, Any], together: str) -> dict[str, Any]:
    """Return the measured tables of all links; collectives inside a node use the first class in `links`."""
    inside = next(iter(links))
    if "host_copy" in ranks[0] and "pcie" in links:
        seconds = median(rank["host_copy"]["median"] for rank in ranks)
        source = f"measured: copy from pinned host memory to the device, {together}"
        links["pcie"]["bandwidth"] = quantity(ranks[0]["host_copy"]["nbytes"] / seconds, source)
    for place, link in ((INSIDE, inside), (BETWEEN, BETWEEN_NODES)):
        found = _collectives(ranks, place)
        if SEND in found:
            links.setdefault(link, {"per": "node", "bandwidth": quantity(None, "to be measured")})
            links[link] |= _link(ranks, place, links[link], found, together)
    return links


def _link(
    ranks: Sequence[dict[str, Any]], place: str, link: dict[str, Any], found: dict[str, Any], together: str
) -> dict[str, Any]:
    """Return the measured keys of one class of links: bandwidth, latency, overlap cost and collectives."""
    (smallest, latency), (largest, seconds) = found[SEND]["points"][0], found[SEND]["points"][-1]
    keys: dict[str, Any] = {}
    if link["bandwidth"]["value"] == "unknown":
        senders = 1 if link["per"] == "device" else ranks[0]["per_node"]
        source = f"measured: message of {largest} bytes to the next rank, {together}"
        if place == BETWEEN:
            source = f"measured: {largest} bytes from each of {senders} ranks of a node to the next node"
            keys["efficiency"] = quantity(1, "bandwidth is the measured rate of messages")
        keys["bandwidth"] = quantity(senders * largest / seconds, source)
    keys["latency_s"] = quantity(latency, f"measured: message of {smallest} bytes to the next rank")
    costs = [rank["overlap"][place] for rank in ranks]
    keys["overlap_cost"] = quantity(
        median(value for rank in costs for value in rank.values()),
        f"measured: median slowdown of matrix products during {', '.join(costs[0])}",
    )
    return keys | {"collectives": found}


def _collectives(ranks: Sequence[dict[str, Any]], place: str) -> dict[str, Any]:
    """Return durations by payload of each collective at `place` (inside or between nodes); `groups`: smaller groups."""
    found: dict[str, Any] = {}
    for same in zip(*(rank.get("links", ()) for rank in ranks), strict=True):
        row = same[0]
        if row["place"] != place:
            continue
        table: dict[str, Any] = {"points": collective_points([other["points"] for other in same])}
        if row["op"] != SEND:
            table |= _group_keys(GroupKind(row["ranks"], row["per_node"], row["stride"]), len(ranks))
        if found.setdefault(row["op"], table) is not table:
            found[row["op"]].setdefault("groups", []).append(table)
    return found


def _group_keys(kind: GroupKind, world: int) -> dict[str, int]:
    """Return the keys that describe a kind of communication groups in a system file, without keys at their defaults."""
    shape = {"ranks": kind.ranks} if kind.ranks != world else {}
    shape |= {"per_node": kind.per_node} if kind.per_node != kind.ranks else {}
    return shape | ({"stride": kind.stride} if kind.stride != 1 else {})


def collective_points(by_rank: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Return pairs [payload, seconds of the slowest rank] of a collective, one for each payload.

    Disturbances only add time, so the seconds of a payload are limited to those of the next larger payload.
    """
    found = [[same[0][0], max(timing[0] for _, timing in same)] for same in zip(*by_rank, strict=True)]
    limit = float("inf")
    for point in reversed(found):
        point[1] = limit = min(limit, round_digits(point[1]))
    return found


def link_facts(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median spread of the durations of collectives, and the overlap cost of each collective."""
    if "links" not in ranks[0]:
        return {}
    timings = [timing for rank in ranks for row in rank["links"] for _, timing in row["points"]]
    spreads = [(high - low) / 2 / middle for middle, low, high, _ in timings]
    found = {"spread_of_collectives": round_digits(median(spreads))}
    for place, costs in ranks[0]["overlap"].items():
        name = "overlap_cost" if place == INSIDE else "overlap_cost_between_nodes"
        for op in costs:
            found[f"{name}_{op}"] = round_digits(median(rank["overlap"][place][op] for rank in ranks))
    return found
