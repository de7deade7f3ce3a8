"""What the ranks measured as the tables of a system file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from repro.calibrate import fit
from repro.calibrate.fit import Point
from repro.config.timing import OperatorRate
from repro.measure.provenance import cpu, gpus, memory, versions
from repro.measure.statistics import quantile
from repro.systems.local import has_nvlink

GUARD = 1e-9
"""Seconds below which the clock says nothing."""


def tables(
    system: str, precision: str, ranks: Sequence[dict[str, Any]], *, repeats: int, load: float, quick: bool
) -> dict[str, Any]:
    """The system file of this machine as plain data, in the file's own order.  ``ranks``: a result of each;
    ``load``: of the machine before they began, which none of the numbers should hold."""
    on_cpu = system == "local"
    count = len(ranks)
    rows = _rows(ranks)
    rates, errors = _rates(rows)
    launch_s = _launch(ranks, rates, on_cpu)
    kernel_s = rates[fit.ELEMENTWISE].fixed_s
    if on_cpu:
        # Host and device are the same core: what goes by before an operator begins is part of it.
        rates = {name: _later(rate, launch_s) for name, rate in rates.items()}
    copy = ranks[0]["copy"]["nbytes"] / _middle(rank["copy"]["median"] for rank in ranks)
    peak = max(row["flops"] / row["median"] for row in rows if row["name"] in fit.PRODUCTS)
    together = "alone" if count == 1 else f"all {count} ranks at once"
    device = _processor(count) if on_cpu else _gpu()
    links = _links(ranks, device.pop("links"), together)
    facts = {
        "device": device["name"],
        "precision": precision,
        "threads": ranks[0]["threads"],
        "cache_bytes": ranks[0]["cache_bytes"],
        "host_s_per_operator": _round(launch_s),
        "operators_measured": len({row["name"] for row in rows}),
        "calls_measured": len(rows),
        "load_before": load,
        "spread_of_calls": _round(quantile([row["spread"] for row in rows], 0.5)),
        "error_of_rates": _round(quantile(errors, 0.5)),
        "error_of_rates_90": _round(quantile(errors, 0.9)),
        **_link_facts(ranks),
        **({} if on_cpu else _gpu_facts()),
        **({"quick": 1} if quick else {}),
    }
    said = "with the operators' fixed_s, since the processor is host and device" if on_cpu else together
    return {
        "note": _note(on_cpu, count),
        "devices_per_node": quantity(count, "ranks of this measurement"),
        "nodes": quantity(1, "this machine"),
        "context_bytes": device.pop("context_bytes"),
        "host_memory_bytes": device.pop("host_memory_bytes"),
        "provenance": {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "torch": versions(["torch"])["torch"],
            "ranks": count,
            "repeats": repeats,
            "facts": facts,
        },
        "device": {
            **device,
            "memory_bandwidth": quantity(
                copy, f"measured: a copy of four caches, read and written, {together}"
            ),
            "peak_flops": {precision: quantity(peak, f"measured: the fastest matrix product, {together}")},
            "time": {
                "matmul_efficiency": quantity(1, "the peak is itself the fastest product"),
                "memory_efficiency": quantity(1, "the bandwidth is itself that of a copy"),
                "kernel_s": quantity(kernel_s, "measured: an element-wise operator on no bytes"),
                "launch_s": quantity(0 if on_cpu else launch_s, f"measured: {said}"),
            },
            "operators": {
                name: {
                    "fixed_s": _round(rate.fixed_s),
                    "per_byte_s": _round(rate.per_byte_s),
                    "per_flop_s": _round(rate.per_flop_s),
                }
                for name, rate in rates.items()
            },
        },
        "links": links,
    }


def quantity(value: float | None, source: str) -> dict[str, Any]:
    """A number beside its source, as in the files."""
    return {"value": "unknown" if value is None else _round(value), "source": source}


def _note(on_cpu: bool, count: int) -> str:
    what = "one processor shared by processes that are its devices" if on_cpu else "the GPUs of one machine"
    return f"Measured by repro calibrate: {what}, {count} ranks."


def _rows(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each measured call: the median over ranks of their medians and of their spreads."""
    found = []
    for same in zip(*(rank["operators"] for rank in ranks), strict=True):
        assert len({(row["name"], row["nbytes"], row["flops"]) for row in same}) == 1, (
            "ranks measured other calls"
        )
        median = _middle(row["median"] for row in same)
        spread = _middle((row["high"] - row["low"]) / 2 / max(GUARD, row["median"]) for row in same)
        found.append({**same[0], "median": max(GUARD, median), "spread": spread})
    return found


def _rates(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, OperatorRate], list[float]]:
    """Rates, and the absolute relative error of the rate that counts at each call."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        points.setdefault(row["name"], []).append(Point(row["nbytes"], row["flops"], row["median"]))
    rates = fit.rates(points)
    errors = [
        abs(error) for name, found in points.items() for error in fit.errors(fit.rate_of(rates, name), found)
    ]
    return rates, errors


def _launch(ranks: Sequence[dict[str, Any]], rates: dict[str, OperatorRate], on_cpu: bool) -> float:
    """Host seconds per operator of a step that has nothing to compute; on processors those beside the operators'."""
    launch = ranks[0]["launch"]
    step = _middle(rank["launch"]["median"] for rank in ranks)
    operators = launch["operators"]
    inside = 0.0
    if on_cpu:
        inside = sum(
            fit.rate_of(rates, name).seconds(flops=flops, nbytes=nbytes) for name, nbytes, flops in operators
        )
    return max(0.0, step - inside) / len(operators)


def _later(rate: OperatorRate, seconds: float) -> OperatorRate:
    return OperatorRate(
        fixed_s=rate.fixed_s + seconds, per_byte_s=rate.per_byte_s, per_flop_s=rate.per_flop_s
    )


def _links(ranks: Sequence[dict[str, Any]], links: dict[str, Any], together: str) -> dict[str, Any]:
    """The link classes of this machine; the first of them is the one that the collectives use."""
    inside = next(iter(links))
    if "host_copy" in ranks[0] and "pcie" in links:
        speed = ranks[0]["host_copy"]["nbytes"] / _middle(rank["host_copy"]["median"] for rank in ranks)
        links["pcie"]["bandwidth"] = quantity(
            speed, f"measured: pinned host memory to the device, {together}"
        )
    if "links" not in ranks[0]:
        return links
    points = {op: _points([rank["links"][op] for rank in ranks]) for op in ranks[0]["links"]}
    (smallest, latency), (largest, seconds) = points["send"][0], points["send"][-1]
    if links[inside]["bandwidth"]["value"] == "unknown":
        source = f"measured: {largest} bytes from one rank to the next, {together}"
        links[inside]["bandwidth"] = quantity(largest / seconds, source)
    links[inside]["latency_s"] = quantity(latency, f"measured: {smallest} bytes from one rank to the next")
    cost = _middle(value for rank in ranks for value in rank["overlap"].values())
    links[inside]["overlap_cost"] = quantity(
        cost, f"measured: products beside {', '.join(ranks[0]['overlap'])}, the median of them"
    )
    links[inside]["collectives"] = {op: {"points": found} for op, found in points.items()}
    return links


def _points(by_rank: Sequence[Sequence[Any]]) -> list[list[float]]:
    """(payload, seconds) of the slowest rank.  No payload takes longer than a larger one: what does was disturbed,
    for noise only adds."""
    found = [[same[0][0], max(timing[0] for _, timing in same)] for same in zip(*by_rank, strict=True)]
    least = float("inf")
    for point in reversed(found):
        point[1] = least = min(least, _round(point[1]))
    return found


def _link_facts(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    if "links" not in ranks[0]:
        return {}
    spreads = [
        (high - low) / 2 / median
        for rank in ranks
        for found in rank["links"].values()
        for _, (median, low, high, _) in found
    ]
    overlaps = {
        f"overlap_cost_{op}": _round(_middle(rank["overlap"][op] for rank in ranks))
        for op in ranks[0]["overlap"]
    }
    return {"spread_of_collectives": _round(quantile(spreads, 0.5)), **overlaps}


def _processor(count: int) -> dict[str, Any]:
    """The processor as ``count`` devices that share its memory."""
    state = memory()
    total = min(state["total_bytes"], state["limit_bytes"] or state["total_bytes"])
    machine = "operating system and cgroup limit, this machine"
    return {
        "name": str(cpu()["model"]),
        "memory_bytes": quantity(total // count, f"an equal part for each of {count} ranks; {machine}"),
        "context_bytes": quantity(0, "a processor has no CUDA context"),
        "host_memory_bytes": quantity(total, machine),
        "links": {"memory": {"per": "device", "bandwidth": quantity(None, "one rank sends nothing")}},
    }


def _gpu() -> dict[str, Any]:
    """The first GPU of this machine; what it is linked by comes first among the links."""
    state, first = memory(), gpus()[0]
    unknown = "the machine does not tell and it was not measured"
    classes = ("nvlink", "pcie") if has_nvlink() else ("pcie",)
    return {
        "name": str(first["name"]),
        "compute_capability": first["compute_capability"] or "",
        "memory_bytes": quantity(first["memory_bytes"], "NVML, this machine"),
        "context_bytes": quantity(None, "it appears when a process starts CUDA and NCCL, and grows"),
        "host_memory_bytes": quantity(state["total_bytes"], "operating system, this machine"),
        "links": {name: {"per": "device", "bandwidth": quantity(None, unknown)} for name in classes},
    }


def _gpu_facts() -> dict[str, Any]:
    first = gpus()[0]
    names = {
        "driver": first["driver"],
        "power_limit_w": first["power_limit_w"],
        "max_sm_mhz": first["max_sm_mhz"],
    }
    nccl = {f"nccl {name}": text for name, text in versions(["nvidia-nccl-cu12", "nvidia-nccl-cu13"]).items()}
    return {key: value for key, value in {**names, **nccl}.items() if value is not None}


def _middle(values: Any) -> float:
    return quantile(list(values), 0.5)


def _round(value: float) -> float:
    """Five digits, more than any of these measurements has."""
    return value if isinstance(value, int) else float(f"{value:.5g}")
