"""Output of `repro models` and `repro systems`: the packaged files, or one of them in full."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from repro.config.links import KEYS
from repro.config.model import Model
from repro.config.models import load_model, model_names
from repro.config.system import Quantity, System
from repro.config.systems import system_names
from repro.measure.local_system import load_system
from repro.model.counts import parameters_by_part, states_bytes, total_parameters
from repro.util import units
from repro.util.console import new_table, print_json, stdout

ZERO_DEGREES = (1, 4, 16, 64, 256, 1024)
"""Data-parallel degrees Nd of the ZeRO paper's Table 1."""
ZERO_STAGES = ("0  DP", "1  P_os", "2  P_os+g", "3  P_os+g+p")


def print_models(name: str | None, json: bool) -> int:
    """Print all models or one in full. Raises `ConfigError` for an unknown name or an invalid file."""
    models = [load_model(name)] if name else [load_model(each) for each in model_names()]
    if json:
        described = [describe_model(model) for model in models]
        print_json(described[0] if name else described)
    elif name:
        _print_model(models[0])
    else:
        _print_all_models(models)
    return 0


def describe_model(model: Model) -> dict[str, Any]:
    """Return the properties of one model as JSON data; memory in bytes per device."""
    from repro.model import counts

    gpt = model.architecture == "gpt"
    psi = total_parameters(model)
    return {
        **dataclasses.asdict(model),
        "ffn": model.ffn_width,
        "head_dim": model.head_width,
        "parameters": psi,
        "parameters_by_part": parameters_by_part(model),
        "states_bytes": {
            f"zero{stage}": {str(nd): states_bytes(psi, nd, stage) for nd in ZERO_DEGREES}
            for stage in range(4)
        },
        "model_flops_per_token": counts.model_flops(model, model.seq, 1) // model.seq if gpt else None,
        "hardware_flops_per_token_recompute": (
            counts.hardware_flops(model, model.seq, 1, True) // model.seq if gpt else None
        ),
        "flops_formula": counts.flops_formula(model) if gpt else "",
    }


def _print_all_models(models: list[Model]) -> None:
    headings = ("model", "layers", "hidden", "heads", "vocab", "parameters", "printed", "states\nGB")
    rows = new_table(*headings, gap=1)  # narrow enough for 80 columns, so that no name or count is cut
    for model in models:
        psi = total_parameters(model)
        rows.add_row(
            model.name,
            _layer_count(model),
            *(str(size) for size in (model.hidden, model.heads, model.vocab)),
            f"{psi:,}",
            model.published_name or "-",
            units.number(states_bytes(psi, 1, 0) / units.GB),
        )
    console = stdout()
    console.print(rows)
    console.print(
        "\nparameters: exact, from the sizes; printed: as the source has them.\n"
        "states: 16 bytes a parameter (mixed-precision Adam, one device); GB = 1e9 bytes.\n"
        "`repro models NAME` shows one model by part and by ZeRO stage."
    )


def _layer_count(model: Model) -> str:
    return f"{model.layers}+{model.decoder_layers}" if model.decoder_layers else str(model.layers)


def _print_model(model: Model) -> None:
    from repro.model import counts

    console = stdout()
    psi = total_parameters(model)
    published = f", published as {model.published_name}" if model.published_name else ""
    console.print(
        f"[bold]{model.name}[/]: {model.architecture}, {psi:,} parameters ({units.parameter_count(psi)}{published})"
    )
    console.print(
        f"{_layer_count(model)} layers, hidden {model.hidden}, {model.heads} heads of width {model.head_width}, "
        f"MLP {model.ffn_width},\nvocabulary {model.vocab}, sequence {model.seq}\n"
    )
    if other := model.departures():
        keys = ", ".join(f"{key} {value}" for key, value in other.items())
        console.print(f"Not as in GPT-2: {keys}\n", markup=False)
    parts = new_table("part", "parameters", "share")
    for part, size in parameters_by_part(model).items():
        parts.add_row(part.replace("_", " "), f"{size:,}", units.percent(size / psi))
    console.print(parts)

    console.print("\nModel states per device in GB (mixed-precision Adam, K = 12) by degree Nd")
    states = new_table("stage", *map(str, ZERO_DEGREES))
    for stage, label in enumerate(ZERO_STAGES):
        states.add_row(label, *(units.number(states_bytes(psi, nd, stage) / units.GB) for nd in ZERO_DEGREES))
    console.print(states)

    if model.architecture == "gpt":
        plain = counts.model_flops(model, model.seq, 1) / model.seq
        repeated = counts.hardware_flops(model, model.seq, 1, True) / model.seq
        console.print(f"\n{units.flop(plain)} per token, {units.flop(repeated)} with recomputation")
        console.print(counts.flops_formula(model).replace("; ", ";\n"))
    for label, text in (("source", model.source), ("note", model.note)):
        if text:
            console.print(f"{label}: {text}", markup=False)


BETWEEN_NODES = "inter-node"
UNKNOWN_NUMBER = "?"
SIGNIFICANT_DIGITS = 4
"""Significant digits of printed system numbers."""


def print_systems(name: str, json: bool) -> int:
    """Print all systems or one in full (name or path). Raises `ConfigError` for an unknown name or an invalid file."""
    systems = [load_system(name)] if name else [load_system(each) for each in system_names()]
    if json:
        described = [describe_system(system) for system in systems]
        print_json(described[0] if name else described)
    elif name:
        _print_system(systems[0])
    else:
        _print_all_systems(systems)
    return 0


def describe_system(system: System) -> dict[str, Any]:
    """Return the properties of one system as JSON data; an unknown value is null."""
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


def _number(value: float | None, scale: float = 1.0) -> str:
    return UNKNOWN_NUMBER if value is None else units.number(value / scale, SIGNIFICANT_DIGITS)


def _bandwidth(system: System, link: str) -> str:
    """Return GB/s per device; `?` for an unknown value and `-` without such a link."""
    if link not in system.links:
        return "-"
    devices, value = system.devices_per_node.value, system.links[link].bandwidth.value
    if value is None or (system.links[link].per == "node" and devices is None):
        return UNKNOWN_NUMBER
    return _number(system.link_per_device(link), units.GB)


def _print_all_systems(systems: list[System]) -> None:
    headings = ("per\nnode", "GB", "fp16\nTFLOP/s", "nvlink\nGB/s", "pcie\nGB/s", "between\nnodes GB/s")
    # Narrow enough for 80 columns, so that no name or number is cut.
    rows = new_table("system", "device", *headings, left=2, wrap=("device",), gap=1)
    for system in systems:
        device = system.device
        peak = device.peak_flops.get("fp16")
        rows.add_row(
            system.name,
            re.sub(r"^NVIDIA | \(.*", "", device.name),
            _number(system.devices_per_node.value),
            _number(device.memory_bytes.value, units.GB),
            _number(peak.value if peak else None, units.TERA),
            *(_bandwidth(system, link) for link in ("nvlink", "pcie", "inter-node")),
        )
    console = stdout()
    console.print(rows)
    console.print(
        "\nGB = 1e9 bytes; bandwidth in one direction and for each device; ?: not known, -: no such link.\n"
        "`repro systems NAME` shows where each number comes from; NAME may be your own .toml file."
    )


def _print_system(system: System) -> None:
    device, context = system.device, system.context_used
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    print(f"{system.name}: {device.name}{capability}")
    rows = [
        _row("devices per node", system.devices_per_node, _number),
        _row("nodes", system.nodes, _number),
        _row("device memory", device.memory_bytes, _size),
        _row("unseen by the allocator", context, _size),
        _row("memory bandwidth", device.memory_bandwidth, _bytes_per_s),
        *(_row(f"{precision} peak", peak, _flop_rate) for precision, peak in device.peak_flops.items()),
        *(
            _row(name, link.bandwidth, _bytes_per_s, f" per {link.per}")
            for name, link in system.links.items()
        ),
        _row("host memory of a node", system.host_memory_bytes, _size),
        *_time_rows(system),
    ]
    for label, value, source in rows:
        print("\n" + _wrapped(f"{label:<25}{value}", ""))
        print(_wrapped(source, "    "))
    _print_measured(system)
    if device.memory_bytes.value is not None:
        print(f"\nThe allocator of one device can reserve {_size(system.allocatable_bytes())}.")
    if system.note:
        print(_wrapped(f"note: {system.note}", ""))


def _row(
    label: str, quantity: Quantity, words: Callable[[float], str], after: str = ""
) -> tuple[str, str, str]:
    """Return label, value and source; the value of an unknown number is `unknown`."""
    value_text = "unknown" if quantity.value is None else words(quantity.value)
    if quantity.ranges:
        low, _, high = quantity.ends
        value_text += f" ({words(low)} to {words(high)})"
    return label, value_text + after, quantity.source


def _size(value: float) -> str:
    return units.size(value, SIGNIFICANT_DIGITS)


def _bytes_per_s(value: float) -> str:
    return f"{_size(value)}/s"


def _flop_rate(value: float) -> str:
    return units.flop_rate(value, SIGNIFICANT_DIGITS)


def _seconds(value: float) -> str:
    return units.seconds(value, SIGNIFICANT_DIGITS)


def _of_peak(value: float) -> str:
    return f"{units.percent(value)} of peak"


FORMATS_BY_KEY: dict[str, Callable[[float], str]] = {
    "kernel_s": _seconds,
    "fill_s": _seconds,
    "launch_s": _seconds,
    "backward_launch_s": _seconds,
    "latency_s": _seconds,
    "start_s": _seconds,
    "chunk_s": _seconds,
    "half_bytes": _size,
    "unaligned_flops": _flop_rate,
    "matmul_efficiency": _of_peak,
    "unthrottled_efficiency": _of_peak,
    "memory_efficiency": _of_peak,
    "efficiency": _of_peak,
    "overlap_cost": units.percent,
    "spread": units.percent,
    "jitter_s": _seconds,
}
"""Formats of the numbers of the time model; other numbers are counts."""
SHOWN_LINK_KEYS = ("latency_s", "efficiency")
NETWORK_KEYS = ("adapters", "rings")
"""Numbers of links between nodes that are shown even if assumed, as `SHOWN_LINK_KEYS` of all links."""


def _time_rows(system: System) -> Iterator[tuple[str, str, str]]:
    """Yield rows of the numbers that the time model uses."""
    time = system.device.time
    used = {field.name: time.used(field.name) for field in dataclasses.fields(time)}
    for name, link in system.links.items():
        always = (*SHOWN_LINK_KEYS, *NETWORK_KEYS) if name == BETWEEN_NODES else SHOWN_LINK_KEYS
        for key in KEYS:
            if key in always or getattr(link, key).value is not None:
                used[f"{name} {key}"] = link.used(name, key)
    for label, quantity in used.items():
        words = FORMATS_BY_KEY.get(label.split()[-1], _number)
        yield _row(label.replace("_", " ").removesuffix(" s"), quantity, words)


def _print_measured(system: System) -> None:
    """Print the measured operators and collectives of a calibrated file."""
    made = system.provenance
    if made is None:
        return
    facts = ", ".join(f"{key} {value}" for key, value in made.facts.items())
    line = f"measured on {made.date} with torch {made.torch}, {made.ranks} ranks, {made.repeats} repeats"
    print("\n" + _wrapped(f"{line}; {facts}" if facts else line, ""))
    for name, rate in system.device.operators.items():
        fixed, per_byte, per_flop = map(_seconds, (rate.fixed_s, rate.per_byte_s, rate.per_flop_s))
        print(_wrapped(f"{name:<40} {fixed} + {per_byte} a byte + {per_flop} a FLOP", ""))
    for link in system.links:
        for operation, collective in system.links[link].collectives.items():
            for found in (collective, *collective.groups):
                ends = (found.points[0], found.points[-1])
                few, many = (f"{_size(size)} in {_seconds(spent)}" for size, spent in ends)
                label = f"{link} {operation}, {found.ranks or made.ranks} ranks"
                label += f" {found.stride} apart" if found.stride > 1 else ""
                print(_wrapped(f"{label:<40} {len(found.points)} sizes, {few} to {many}", ""))


def _wrapped(text: str, indent: str) -> str:
    """Wrap text to the terminal's width, without breaks in addresses, which remain copyable."""
    return textwrap.fill(
        text,
        stdout().width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
