"""System file that a calibration writes: tables from the measurements of all ranks, and their TOML text."""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from repro.accuracy.calibrate import fit
from repro.accuracy.calibrate.fit import TimedCall, quantity, round_digits
from repro.config.network import core_share
from repro.config.timing import EXCHANGE, MESSAGE, UNALIGNED_MATMUL, OperatorRate
from repro.emulate.compute_rate import COMPUTE_RATE_FACT
from repro.measure.statistics import quantile
from repro.simulate.time.device import expected_maximum
from repro.simulate.time.emulated import MESSAGE_CORES_FACT

STEP = "step_over_operators"
"""Key of a measured ratio: duration of a step without messages on shared cores over the sum of its operators' times."""
RESOLUTION_S = 1e-9
"""Minimum duration of a measured operator call, in seconds; the clock may return 0 for shorter calls."""


def system_tables(
    system: str,
    precision: str,
    ranks: Sequence[dict[str, Any]],
    *,
    repeats: int,
    load: float,
    quick: bool,
    site: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the tables of a calibrated system file, in the order of the file.

    `ranks` contains the results of all ranks, `load` the machine's load average before the calibration, and `site` job
    and nodes of a SLURM allocation. `repeats` is the number of measurements per value.
    """
    on_cpu = system == "local"
    count, here = len(ranks), ranks[0]["machine"]
    per_node = ranks[0]["per_node"]
    site = site or {}
    rows = _rows(ranks)
    rates, errors = _rates(rows)
    launch_s = _launch(ranks, rates, on_cpu)
    kernel_s = rates[fit.ELEMENTWISE].fixed_s
    if on_cpu:
        # A processor core is host and device, so the duration of an operator includes its launch.
        rates = {name: replace(rate, fixed_s=rate.fixed_s + launch_s) for name, rate in rates.items()}
    silent = list(zip(*(rank.get("silent", ()) for rank in ranks), strict=True))
    step = _step(silent, rates) if silent else {}
    rates = {name: rate.slowed(step.get(STEP, 1.0)) for name, rate in rates.items()}
    if "message_s" in ranks[0]:
        rates[MESSAGE] = OperatorRate(fixed_s=statistics.median(rank["message_s"] for rank in ranks))
        rates[EXCHANGE] = OperatorRate(fixed_s=statistics.median(rank["exchange_s"] for rank in ranks))
    copy = ranks[0]["copy"]["nbytes"] / statistics.median(rank["copy"]["median"] for rank in ranks)
    aligned = [row for row in rows if row["name"] in fit.MATMULS and not row["is_unaligned"]]
    peak = max(row["flops"] / row["median"] for row in aligned)
    together = "alone" if count == 1 else f"all {count} ranks at once"
    device = _processor(here, per_node) if on_cpu else _gpu(ranks)
    links = fit.link_tables(ranks, device.pop("links"), together)
    facts = {
        "device": device["name"],
        "precision": precision,
        "threads": ranks[0]["threads"],
        "cache_bytes": ranks[0]["cache_bytes"],
        "host_s_per_operator": round_digits(launch_s),
        **step,
        "operators_measured": len({row["name"] for row in rows}),
        "calls_measured": len(rows),
        "load_before": load,
        "spread_of_calls": round_digits(statistics.median([row["spread"] for row in rows])),
        "error_of_rates": round_digits(statistics.median(errors)),
        "error_of_rates_90": round_digits(quantile(errors, 0.9)),
        **fit.link_facts(ranks),
        **(_core_facts(ranks, per_node) if on_cpu else _gpu_facts(ranks)),
        **site,
        **({"quick": 1} if quick else {}),
    }
    launched = (
        "fixed_s of the operators includes the launch, because the processor is host and device"
        if on_cpu
        else together
    )
    return {
        "note": _note(on_cpu, per_node, count),
        "devices_per_node": quantity(per_node, "ranks per node in this measurement"),
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
                copy, f"measured: copy of four times the cache size, read and written bytes, {together}"
            ),
            "peak_flops": {precision: quantity(peak, f"measured: the fastest matrix product, {together}")},
            "time": {
                "matmul_efficiency": quantity(1, "peak_flops is the measured rate of a matrix product"),
                "memory_efficiency": quantity(1, "memory_bandwidth is the measured rate of a copy"),
                "kernel_s": quantity(kernel_s, "measured: element-wise operator, extrapolated to no bytes"),
                "fill_s": quantity(0, "included in the measured seconds of each operator"),
                **(_rank_differences(silent) if silent else {}),
                "launch_s": quantity(0 if on_cpu else launch_s, f"measured: {launched}"),
                **({} if on_cpu else {"backward_launch_s": _backward_launch(ranks, together)}),
            },
            "operators": {
                name: {key: round_digits(value) for key, value in asdict(rate).items()}
                for name, rate in rates.items()
            },
        },
        "links": links,
    }


def _note(on_cpu: bool, per_node: int, count: int) -> str:
    where = "one machine" if per_node == count else f"each of {count // per_node} nodes"
    what = "processor cores, each rank a device" if on_cpu else f"the GPUs of {where}"
    return f"Measured by repro calibrate: {what}, {count} ranks, {per_node} per node."


def _rows(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each measured operator call, with the median duration and the spread over all ranks."""
    found = []
    for same in zip(*(rank["operators"] for rank in ranks), strict=True):
        calls = {(row["name"], row["nbytes"], row["flops"]) for row in same}
        assert len(calls) == 1, "all ranks must measure the same calls"
        medians = [max(RESOLUTION_S, row["median"]) for row in same]
        spreads = ((row["high"] - row["low"]) / 2 / m for row, m in zip(same, medians, strict=True))
        row = {"median": statistics.median(medians), "spread": statistics.median(spreads)}
        found.append({**same[0], **row})
    return found


def _rates(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, OperatorRate], list[float]]:
    """Return the fitted rate of each operator, and the fit's absolute relative error at each measured call."""
    points: dict[str, list[TimedCall]] = {}
    for row in rows:
        name = UNALIGNED_MATMUL if row["is_unaligned"] else row["name"]
        points.setdefault(name, []).append(TimedCall(row["nbytes"], row["flops"], row["median"]))
    rates = fit.operator_rates(points)
    errors = (fit.relative_errors(fit.rate_of(rates, name), found) for name, found in points.items())
    return rates, [abs(error) for error in chain.from_iterable(errors)]


def _launch(ranks: Sequence[dict[str, Any]], rates: dict[str, OperatorRate], on_cpu: bool) -> float:
    """Return the host time per operator, in seconds, measured in a training step of a tiny model.

    On processors, the fitted seconds of the operators are subtracted. On a GPU, the backward pass is excluded.
    """
    launch = ranks[0]["launch"]
    step = statistics.median(rank["launch"]["median"] for rank in ranks)
    operators = launch["operators"]
    if on_cpu:
        inside = sum(_call_s(rates, *call) for call in operators)
        return max(0.0, step - inside) / len(operators)
    others = len(operators) - launch["backward_operators"]
    return max(0.0, step - statistics.median(rank["launch"]["backward_s"] for rank in ranks)) / others


def _call_s(rates: dict[str, OperatorRate], name: str, nbytes: float, flops: float) -> float:
    return fit.rate_of(rates, name).seconds(flops=flops, nbytes=nbytes)


def _backward_launch(ranks: Sequence[dict[str, Any]], together: str) -> dict[str, Any]:
    """Return the host time per operator in the backward pass, in seconds, measured in a step of a tiny model."""
    seconds = statistics.median(rank["launch"]["backward_s"] for rank in ranks)
    operators = ranks[0]["launch"]["backward_operators"]
    return quantity(seconds / operators, f"measured: backward pass of a tiny model, {together}")


SilentSteps = Sequence[tuple[dict[str, Any], ...]]
"""Results of all ranks for each training step without messages; empty if every rank has a separate core."""


def _step(silent: SilentSteps, rates: dict[str, OperatorRate]) -> dict[str, float]:
    """Return the ratio of a step's time without messages to the summed times of its operators: median and spread."""
    times = []
    for same in silent:
        operators = sum(calls * _call_s(rates, *call) for *call, calls in same[0]["operators"])
        times.append(statistics.median(rank["seconds"] for rank in same) / operators)
    middle = statistics.median(times)
    spread = (quantile(times, 0.75) - quantile(times, 0.25)) / 2 / middle
    return {STEP: round_digits(middle), f"{STEP}_spread": round_digits(spread)}


def _rank_differences(silent: SilentSteps) -> dict[str, dict[str, Any]]:
    """Return the differences of ranks that compute equal steps, `spread` and `jitter_s`, as medians over the steps.

    `jitter_s` is the variance of the time between two messages, divided by the mean time. The estimate uses the delay
    of the last rank relative to the mean of all ranks. `spread` is the standard deviation of the step times of
    different ranks, divided by their mean, without the contribution of the jitter.
    """
    spreads, jitters = [], []
    for same in silent:
        seconds_of_ranks = [rank["seconds"] for rank in same]
        mean = statistics.fmean(seconds_of_ranks)
        late = roots = 0.0
        for parts in zip(*(chain.from_iterable(rank["between"]) for rank in same), strict=True):
            scaled = [part * mean / seconds for part, seconds in zip(parts, seconds_of_ranks, strict=True)]
            late += max(scaled) - statistics.fmean(scaled)
            roots += statistics.fmean(scaled) ** 0.5
        jitter = (late / roots / expected_maximum(len(same))) ** 2 if roots else 0.0
        jitters.append(jitter)
        own = statistics.variance(seconds_of_ranks) - jitter * mean / len(same[0]["between"])
        spreads.append(max(0.0, own) ** 0.5 / mean)
    source = "measured in steps without messages:"
    return {
        "spread": quantity(
            statistics.median(spreads), f"{source} differences between the step times of ranks"
        ),
        "jitter_s": quantity(statistics.median(jitters), f"{source} times between two omitted messages"),
    }


def _processor(here: dict[str, Any], count: int) -> dict[str, Any]:
    """Return system-file tables for a processor as `count` devices that share its memory."""
    state = here["memory"]
    total = min(state["total_bytes"], state["limit_bytes"] or state["total_bytes"])
    machine = "operating system and cgroup limit on the node of rank 0"
    return {
        "name": str(here["cpu"]),
        "memory_bytes": quantity(total // count, f"host memory / {count} ranks; {machine}"),
        "context_bytes": quantity(0, "a processor has no CUDA context"),
        "host_memory_bytes": quantity(total, machine),
        "links": {"memory": {"per": "device", "bandwidth": quantity(None, "not measured with one rank")}},
    }


def _gpu(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return system-file tables for the first GPU of a node; the first class in `links` connects the node's GPUs."""
    here = ranks[0]["machine"]
    first, context = here["gpus"][0], max(rank["context_bytes"] for rank in ranks)
    unknown = "not reported by the driver and not measured"
    outside_torch = f"measured: memory in use outside torch's allocator, maximum of {len(ranks)} ranks"
    classes = ("nvlink", "pcie") if here["nvlink"] else ("pcie",)
    return {
        "name": str(first["name"]),
        "compute_capability": first["compute_capability"] or "",
        "memory_bytes": quantity(first["memory_bytes"], "NVML on the node of rank 0"),
        "context_bytes": quantity(context, outside_torch),
        "host_memory_bytes": quantity(here["memory"]["total_bytes"], "operating system, node of rank 0"),
        "links": {name: {"per": "device", "bandwidth": quantity(None, unknown)} for name in classes},
    }


def _core_facts(ranks: Sequence[dict[str, Any]], per_node: int) -> dict[str, Any]:
    """Return a processor's matrix-product FLOP/s per rank, and its number of cores that transfer messages."""
    share = core_share(per_node, ranks[0]["machine"]["cores"])
    rates = (rank["products"] for rank in ranks if rank["products"] is not None)
    rate = round_digits(statistics.median(rates) * share)
    return {COMPUTE_RATE_FACT: rate, MESSAGE_CORES_FACT: ranks[0]["carrying"]}


def _gpu_facts(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return facts about GPUs: driver, limits, NCCL, and the median clock rate and power during the measurement."""
    here = ranks[0]["machine"]
    first = here["gpus"][0]
    names = {key: first[key] for key in ("driver", "power_limit_w", "max_sm_mhz")}
    nccl = {f"nccl {name}": text for name, text in here["versions"].items() if "nccl" in name}
    states = {
        key: round_digits(statistics.median(rank["gpu_state"][key] for rank in ranks))
        for key in ("sm_mhz", "power_w")
        if all(key in rank["gpu_state"] for rank in ranks)
    }
    return {key: value for key, value in {**names, **states, **nccl}.items() if value is not None}


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(tables: dict[str, Any]) -> str:
    """Return `tables` as a TOML document: tables with a `source` are inline, all others have a header."""
    return "\n".join(_table(tables, ())).strip("\n") + "\n"


def _table(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items() if not _is_table(value)]
    if lines and path:
        lines = ["", f"[{'.'.join(map(toml_key, path))}]", *lines]
    for key, value in table.items():
        if _is_table(value):
            lines += _table(value, (*path, key))
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and "source" not in value


def toml_key(key: str) -> str:
    """Return `key` as a TOML key, in quotes if TOML requires quotes."""
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def toml_value(value: Any, number: Callable[[int | float], str] = repr) -> str:
    """Return a value as TOML text on one line; `number` formats integers and floats."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml_key(k)} = {toml_value(v, number)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(entry, number) for entry in value) + "]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return json.dumps(value, ensure_ascii=False)
