"""`repro systems`: every system file with its main numbers, or one with the source of each number."""

from __future__ import annotations

import dataclasses
import json as json_format
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from repro.config.links import KEYS
from repro.config.system import Link, Quantity, System
from repro.systems.load import load, names

GB, GIB, TERA = 1e9, 2**30, 1e12
BETWEEN_NODES = "inter-node"
KIB, MICRO, PICO = 1024, 1e-6, 1e-12
UNKNOWN = "?"


def command(name: str, json: bool) -> int:
    """Print all systems, or all about one (a name or the path of a file).  Raises `ConfigError`."""
    systems = [load(name)] if name else [load(each) for each in names()]
    if json:
        described = [describe(system) for system in systems]
        json_format.dump(described[0] if name else described, sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif name:
        _print_one(systems[0])
    else:
        _print_all(systems)
    return 0


def describe(system: System) -> dict[str, Any]:
    """Everything that the command shows of one system, as JSON data; a value nobody knows is null."""
    known = system.device.memory_bytes.value is not None
    return {
        **dataclasses.asdict(system),
        "context_bytes_used": dataclasses.asdict(system.context_used),
        "time_used": {
            field.name: dataclasses.asdict(system.device.time.used(field.name))
            for field in dataclasses.fields(system.device.time)
        },
        "links_used": {
            name: {key: dataclasses.asdict(link.used(name, key)) for key in KEYS}
            for name, link in system.links.items()
        },
        "allocatable_bytes": system.allocatable_bytes() if known else None,
    }


def human(quantity: Quantity, scale: float, unit: str) -> str:
    """`900 GB/s`; `unknown` where nobody knows."""
    if quantity.value is None:
        return "unknown"
    return f"{quantity.value / scale:,.5g} {unit}".rstrip()


def _number(value: float | None, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else f"{value / scale:.4g}"


def _bandwidth(system: System, link: str) -> str:
    """GB/s per device; `?` where it is unknown and `-` where there is no such link."""
    if link not in system.links:
        return "-"
    devices, value = system.devices_per_node.value, system.links[link].bandwidth.value
    if value is None or (system.links[link].per == "node" and devices is None):
        return UNKNOWN
    return _number(system.link_per_device(link), GB)


def _print_all(systems: list[System]) -> None:
    from rich.console import Console
    from rich.table import Table

    # Narrow enough for 80 columns, so that no name or number is cut.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("system", no_wrap=True)
    table.add_column("device", no_wrap=True, max_width=17, overflow="ellipsis")
    for heading in ("per\nnode", "GB", "fp16\nTFLOP/s", "nvlink\nGB/s", "pcie\nGB/s", "between\nnodes GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for system in systems:
        device = system.device
        peak = device.peak_flops.get("fp16")
        table.add_row(
            system.name,
            re.sub(r"^NVIDIA | \(.*", "", device.name),
            _number(system.devices_per_node.value),
            _number(device.memory_bytes.value, GB),
            _number(peak.value if peak else None, TERA),
            *(_bandwidth(system, link) for link in ("nvlink", "pcie", "inter-node")),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\nGB = 1e9 bytes; bandwidth in one direction and for each device; ?: not known, -: no such link.\n"
        "`repro systems NAME` shows where each number comes from; NAME may be your own .toml file."
    )


def _print_one(system: System) -> None:
    device, context = system.device, system.context_used
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    print(f"{system.name}: {device.name}{capability}")
    rows = [
        ("devices per node", human(system.devices_per_node, 1, ""), system.devices_per_node),
        ("nodes", human(system.nodes, 1, ""), system.nodes),
        ("device memory", human(device.memory_bytes, GIB, "GiB"), device.memory_bytes),
        ("unseen by the allocator", human(context, GIB, "GiB"), context),
        ("memory bandwidth", human(device.memory_bandwidth, GB, "GB/s"), device.memory_bandwidth),
        *((f"{k} peak", human(peak, TERA, "TFLOP/s"), peak) for k, peak in device.peak_flops.items()),
        *((k, _per(link), link.bandwidth) for k, link in system.links.items()),
        ("host memory of a node", human(system.host_memory_bytes, GIB, "GiB"), system.host_memory_bytes),
    ]
    for label, value, quantity in rows:
        print(f"\n{label:<25}{value}")
        print(_wrapped(quantity.source, "    "))
    for label, value, source in _time_rows(system):
        print(f"\n{label:<25}{value}")
        print(_wrapped(source, "    "))
    _print_measured(system)
    if device.memory_bytes.value is not None:
        print(f"\nThe allocator of one device can reserve {system.allocatable_bytes() / GIB:.5g} GiB.")
    if system.note:
        print(_wrapped(f"note: {system.note}", ""))


UNITS = {
    "kernel_s": (MICRO, "us"),
    "launch_s": (MICRO, "us"),
    "latency_s": (MICRO, "us"),
    "start_s": (MICRO, "us"),
    "half_bytes": (KIB, "KiB"),
    "unaligned_flops": (TERA, "TFLOP/s"),
    "matmul_efficiency": (0.01, "% of peak"),
    "memory_efficiency": (0.01, "% of peak"),
    "efficiency": (0.01, "% of peak"),
    "overlap_cost": (0.01, "%"),
}
"""How the numbers for time are shown; the others count something."""


ALWAYS = ("latency_s", "efficiency")
NETWORK = ("adapters", "rings")
"""Numbers of a link that are shown though they are assumed: for every class, and beyond a node."""


def _time_rows(system: System) -> Iterator[tuple[str, str, str]]:
    """(label, value, source) of what the model of time uses."""
    time = system.device.time
    for key in (field.name for field in dataclasses.fields(time)):
        yield _row(key, time.used(key))
    for name, link in system.links.items():
        always = (*ALWAYS, *NETWORK) if name == BETWEEN_NODES else ALWAYS
        for key in KEYS:
            if key in always or getattr(link, key).value is not None:
                yield _row(f"{name} {key}", link.used(name, key))


def _row(label: str, quantity: Quantity) -> tuple[str, str, str]:
    scale, unit = UNITS.get(label.split()[-1], (1, ""))
    return label.replace("_", " ").removesuffix(" s"), human(quantity, scale, unit), quantity.source


def _print_measured(system: System) -> None:
    """What a calibrated file holds beside quantities."""
    made = system.provenance
    if made is None:
        return
    facts = ", ".join(f"{key} {value}" for key, value in made.facts.items())
    line = f"measured on {made.date} with torch {made.torch}, {made.ranks} ranks, {made.repeats} repeats"
    print("\n" + _wrapped(f"{line}; {facts}" if facts else line, ""))
    for name, rate in system.device.operators.items():
        parts = f"{rate.per_byte_s / PICO:.4g} ps a byte + {rate.per_flop_s / PICO:.4g} ps a FLOP"
        print(f"{name:<40} {rate.fixed_s / MICRO:.4g} us + {parts}")
    for link in system.links:
        for operation, collective in system.links[link].collectives.items():
            for found in (collective, *collective.groups):
                ends = (found.points[0], found.points[-1])
                few, many = (f"{size / KIB:,.4g} KiB in {seconds / MICRO:,.4g} us" for size, seconds in ends)
                label = f"{link} {operation}, {found.ranks or made.ranks} ranks"
                label += f" {found.stride} apart" if found.stride > 1 else ""
                print(f"{label:<40} {len(found.points)} sizes, {few} to {many}")


def _wrapped(text: str, indent: str) -> str:
    """Lines as wide as the terminal; addresses are not broken, so that they can be copied."""
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _per(link: Link) -> str:
    return f"{human(link.bandwidth, GB, 'GB/s')} per {link.per}"
