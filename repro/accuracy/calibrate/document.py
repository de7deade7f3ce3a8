"""What the ranks measured as the tables of a system file."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any

from repro.accuracy.calibrate import document_links, fit
from repro.accuracy.calibrate.fit import Measurement
from repro.accuracy.calibrate.numbers import middle, quantity, rounded
from repro.config.network import core_share
from repro.config.timing import EXCHANGE, MESSAGE, OperatorRate
from repro.emulate.compute_rate import COMPUTE_RATE_FACT
from repro.measure.statistics import quantile
from repro.simulate.time.device import expected_maximum
from repro.simulate.time.emulated import MESSAGE_CORES_FACT

STEP = "step_over_operators"
"""The fact of how many times as long as its operators, timed one by one, a step without messages takes in a crowd."""
GUARD = 1e-9
"""Seconds below which the clock says nothing."""


def tables(
    system: str,
    precision: str,
    ranks: Sequence[dict[str, Any]],
    *,
    repeats: int,
    load: float,
    quick: bool,
    site: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The system file of the ranks' machine as plain data, in the file's own order.  `ranks`: a result of each;
    `load`: of the machine before they began, which none of the numbers should hold; `site`: of an allocation,
    its job and its nodes."""
    on_cpu = system == "local"
    count, here = len(ranks), ranks[0]["machine"]
    per_node = ranks[0]["per_node"]
    site = site or {}
    rows = _rows(ranks)
    rates, errors = _rates(rows)
    launch_s = _launch(ranks, rates, on_cpu)
    kernel_s = rates[fit.ELEMENTWISE].fixed_s
    if on_cpu:
        # Host and device are the same core: what goes by before an operator begins is part of it.
        rates = {name: _later(rate, launch_s) for name, rate in rates.items()}
    silent = list(zip(*(rank.get("silent", ()) for rank in ranks), strict=True))
    step = _step(silent, rates) if silent else {}
    rates = {name: rate.slowed(step.get(STEP, 1.0)) for name, rate in rates.items()}
    if "message_s" in ranks[0]:
        rates[MESSAGE] = OperatorRate(fixed_s=middle(rank["message_s"] for rank in ranks))
        rates[EXCHANGE] = OperatorRate(fixed_s=middle(rank["exchange_s"] for rank in ranks))
    copy = ranks[0]["copy"]["nbytes"] / middle(rank["copy"]["median"] for rank in ranks)
    peak = max(row["flops"] / row["median"] for row in rows if row["name"] in fit.PRODUCTS)
    together = "alone" if count == 1 else f"all {count} ranks at once"
    device = _processor(here, per_node) if on_cpu else _gpu(ranks)
    links = document_links.tables(ranks, device.pop("links"), together)
    facts = {
        "device": device["name"],
        "precision": precision,
        "threads": ranks[0]["threads"],
        "cache_bytes": ranks[0]["cache_bytes"],
        "host_s_per_operator": rounded(launch_s),
        **step,
        "operators_measured": len({row["name"] for row in rows}),
        "calls_measured": len(rows),
        "load_before": load,
        "spread_of_calls": rounded(quantile([row["spread"] for row in rows], 0.5)),
        "error_of_rates": rounded(quantile(errors, 0.5)),
        "error_of_rates_90": rounded(quantile(errors, 0.9)),
        **document_links.facts(ranks),
        **(_core_facts(ranks, per_node) if on_cpu else _gpu_facts(here)),
        **site,
        **({"quick": 1} if quick else {}),
    }
    said = "with the operators' fixed_s, since the processor is host and device" if on_cpu else together
    return {
        "note": _note(on_cpu, per_node, count),
        "devices_per_node": quantity(per_node, "ranks of a node in this measurement"),
        "nodes": quantity(count // per_node, "nodes of this measurement"),
        "context_bytes": device.pop("context_bytes"),
        "host_memory_bytes": device.pop("host_memory_bytes"),
        "provenance": {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "torch": here["versions"]["torch"],
            "ranks": count,
            "repeats": repeats,
            **({"cores": here["cores"]} if on_cpu else {}),
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
                "fill_s": quantity(0, "the operators' own seconds have it"),
                **(_unlike(silent) if silent else {}),
                "launch_s": quantity(0 if on_cpu else launch_s, f"measured: {said}"),
            },
            "operators": {
                name: {
                    "fixed_s": rounded(rate.fixed_s),
                    "per_byte_s": rounded(rate.per_byte_s),
                    "per_flop_s": rounded(rate.per_flop_s),
                }
                for name, rate in rates.items()
            },
        },
        "links": links,
    }


def _note(on_cpu: bool, per_node: int, count: int) -> str:
    where = "one machine" if per_node == count else f"each of {count // per_node} nodes"
    what = "processors shared by processes that are their devices" if on_cpu else f"the GPUs of {where}"
    return f"Measured by repro calibrate: {what}, {count} ranks, {per_node} on a node."


def _rows(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each measured call: the median over ranks of their medians and of their spreads."""
    found = []
    for same in zip(*(rank["operators"] for rank in ranks), strict=True):
        assert len({(row["name"], row["nbytes"], row["flops"]) for row in same}) == 1, (
            "ranks measured other calls"
        )
        median = middle(row["median"] for row in same)
        spread = middle((row["high"] - row["low"]) / 2 / max(GUARD, row["median"]) for row in same)
        found.append({**same[0], "median": max(GUARD, median), "spread": spread})
    return found


def _rates(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, OperatorRate], list[float]]:
    """Rates, and the absolute relative error of the rate that counts at each call."""
    points: dict[str, list[Measurement]] = {}
    for row in rows:
        points.setdefault(row["name"], []).append(Measurement(row["nbytes"], row["flops"], row["median"]))
    rates = fit.rates(points)
    errors = [
        abs(error) for name, found in points.items() for error in fit.errors(fit.rate_of(rates, name), found)
    ]
    return rates, errors


def _launch(ranks: Sequence[dict[str, Any]], rates: dict[str, OperatorRate], on_cpu: bool) -> float:
    """Host seconds per operator of a step that has nothing to compute; on processors those beside the operators'."""
    launch = ranks[0]["launch"]
    step = middle(rank["launch"]["median"] for rank in ranks)
    operators = launch["operators"]
    inside = 0.0
    if on_cpu:
        inside = sum(
            fit.rate_of(rates, name).seconds(flops=flops, nbytes=nbytes) for name, nbytes, flops in operators
        )
    return max(0.0, step - inside) / len(operators)


SilentSteps = Sequence[tuple[dict[str, Any], ...]]
"""Steps without messages, each as all ranks had it: none where ranks share no core."""


def _step(silent: SilentSteps, rates: dict[str, OperatorRate]) -> dict[str, float]:
    """How many times as long as its operators one by one a step without messages takes, in the median."""
    times = []
    for same in silent:
        operators = sum(
            calls * fit.rate_of(rates, name).seconds(flops=flops, nbytes=nbytes)
            for name, nbytes, flops, calls in same[0]["operators"]
        )
        times.append(middle(rank["seconds"] for rank in same) / operators)
    return {
        STEP: rounded(middle(times)),
        f"{STEP}_spread": rounded((quantile(times, 0.75) - quantile(times, 0.25)) / 2 / middle(times)),
    }


def _unlike(silent: SilentSteps) -> dict[str, dict[str, Any]]:
    """How ranks that compute the same differ: medians over the steps.

    `jitter_s`: variance over mean of what one computes between two messages, by what the last of all ranks comes later
    than their mean, which a collective waits for.  `spread`: standard deviation over mean of what a whole step takes on
    one rank and on another, less the jitter's part of it.
    """
    spreads, jitters = [], []
    for same in silent:
        whole = [rank["seconds"] for rank in same]
        mean = statistics.fmean(whole)
        late = roots = 0.0
        for parts in zip(*(chain.from_iterable(rank["between"]) for rank in same), strict=True):
            alike = [part * mean / seconds for part, seconds in zip(parts, whole, strict=True)]
            late += max(alike) - statistics.fmean(alike)
            roots += statistics.fmean(alike) ** 0.5
        jitter = (late / roots / expected_maximum(len(same))) ** 2 if roots else 0.0
        jitters.append(jitter)
        spreads.append(
            max(0.0, statistics.variance(whole) - jitter * mean / len(same[0]["between"])) ** 0.5 / mean
        )
    said = "measured: steps without messages,"
    return {
        "spread": quantity(rounded(middle(spreads)), f"{said} of one rank and of another"),
        "jitter_s": quantity(rounded(middle(jitters)), f"{said} between where these would be"),
    }


def _later(rate: OperatorRate, seconds: float) -> OperatorRate:
    return OperatorRate(
        fixed_s=rate.fixed_s + seconds, per_byte_s=rate.per_byte_s, per_flop_s=rate.per_flop_s
    )


def _processor(here: dict[str, Any], count: int) -> dict[str, Any]:
    """The processor as `count` devices that share its memory."""
    state = here["memory"]
    total = min(state["total_bytes"], state["limit_bytes"] or state["total_bytes"])
    machine = "operating system and cgroup limit, rank 0's node"
    return {
        "name": str(here["cpu"]),
        "memory_bytes": quantity(total // count, f"an equal part for each of {count} ranks; {machine}"),
        "context_bytes": quantity(0, "a processor has no CUDA context"),
        "host_memory_bytes": quantity(total, machine),
        "links": {"memory": {"per": "device", "bandwidth": quantity(None, "one rank sends nothing")}},
    }


def _gpu(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first GPU of a node; what it is linked by comes first among the links."""
    here = ranks[0]["machine"]
    first, context = here["gpus"][0], max(rank["context_bytes"] for rank in ranks)
    unknown = "the machine does not tell and it was not measured"
    classes = ("nvlink", "pcie") if here["nvlink"] else ("pcie",)
    return {
        "name": str(first["name"]),
        "compute_capability": first["compute_capability"] or "",
        "memory_bytes": quantity(first["memory_bytes"], "NVML, rank 0's node"),
        "context_bytes": quantity(
            context, f"measured: in use beside torch's memory at the end, the most of {len(ranks)} ranks"
        ),
        "host_memory_bytes": quantity(here["memory"]["total_bytes"], "operating system, rank 0's node"),
        "links": {name: {"per": "device", "bandwidth": quantity(None, unknown)} for name in classes},
    }


def _core_facts(ranks: Sequence[dict[str, Any]], per_node: int) -> dict[str, Any]:
    """What a rank's products reach when it is held to its share of a core."""
    share = core_share(per_node, ranks[0]["machine"]["cores"])
    rates = (rank["products"] for rank in ranks if rank["products"] is not None)
    return {COMPUTE_RATE_FACT: rounded(middle(rates) * share), MESSAGE_CORES_FACT: ranks[0]["carrying"]}


def _gpu_facts(here: dict[str, Any]) -> dict[str, Any]:
    first = here["gpus"][0]
    names = {
        "driver": first["driver"],
        "power_limit_w": first["power_limit_w"],
        "max_sm_mhz": first["max_sm_mhz"],
    }
    nccl = {f"nccl {name}": text for name, text in here["versions"].items() if "nccl" in name}
    return {key: value for key, value in {**names, **nccl}.items() if value is not None}
