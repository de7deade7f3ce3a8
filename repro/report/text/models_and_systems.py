"""Output of `repro models` and `repro systems`: all packaged models or systems, or all properties of one."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from repro.config.links import KEYS
from repro.config.model import Model
from repro.config.models import REPORT_FILES, load_model, model_aliases, model_groups, model_names
from repro.config.system import Quantity, System
from repro.config.systems import LOCAL, REPORT_SYSTEMS, system_aliases, system_names
from repro.measure.local_system import load_system
from repro.model.counts import parameters_by_part, states_bytes, total_parameters
from repro.util import units
from repro.util.console import new_table, print_json, print_page, stdout

ZERO_DEGREES = (1, 4, 16, 64, 256, 1024)
"""Data-parallel degrees Nd in Table 1 of the ZeRO paper."""
ZERO_STAGES = ("0  DP", "1  P_os", "2  P_os+g", "3  P_os+g+p")


def print_models(name: str | None, json: bool, details: bool = False) -> int:
    """Print all models, or all properties of the model `name` (a name or a file). Raises `ConfigError`."""
    models = [load_model(each) for each in ([name] if name else model_names())]
    if json:
        described = [describe_model(model) for model in models]
        print_json(described[0] if name else described)
    elif name:
        _print_model(name, models[0], details)
    elif details:
        _print_every_model(models)
    else:
        _print_model_groups({model.name: model for model in models})
    return 0


def describe_model(model: Model) -> dict[str, Any]:
    """Return the properties of a model as JSON data, with the bytes of model states per device by ZeRO stage and Nd."""
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


def _print_model_groups(models: dict[str, Model]) -> None:
    """Print one row per group of models with example names, first the groups of the reproduced reports."""
    aliases, groups, examples = model_aliases(), model_groups(), "examples (other names)"
    made = new_table("group", "models", "parameters", examples, left={"group", examples}, wrap=(examples,))
    for group, names in groups.items():
        sizes = [total_parameters(models[name]) for name in names]
        size = " to ".join(dict.fromkeys(units.parameter_count(end(sizes)) for end in (min, max)))
        others = {name: ", ".join(alias for alias, of in aliases.items() if of == name) for name in names}
        text = ", ".join(f"{name} ({other})" for name, other in others.items() if other) or ", ".join(names)
        text = textwrap.shorten(text, 50, placeholder=" ...", break_on_hyphens=False)
        made.add_row(group, str(len(names)), size, text)
    text = f"{len(models)} models in {len(groups)} groups; the first {len(REPORT_FILES)} are from reproduced reports."
    text += " --details lists every model."
    print_page(text, made, command="repro models gpt2-1.5b")


def _print_every_model(models: list[Model]) -> None:
    sizes = ("layers", "hidden\nsize", "heads", "vocab\nsize")
    headings = ("model", *sizes, "parameters", "printed", "states\n(GB)")
    rows = new_table(*headings, gap=1)  # With a larger gap, the table would not fit in 80 columns.
    for model in models:
        psi = total_parameters(model)
        widths = (str(size) for size in (model.hidden, model.heads, model.vocab))
        states = units.number(states_bytes(psi, 1, 0) / units.GB)
        rows.add_row(
            model.name, _layer_count(model), *widths, f"{psi:,}", model.published_name or "-", states
        )
    other = ", ".join(f"{alias} = {name}" for alias, name in model_aliases().items())
    print_page(
        rows,
        "parameters: exact count; printed: size that the source states; states: parameters, gradients and Adam's "
        "moments in mixed precision, 16 bytes per parameter.",
        f"Other names: {other}.",
        console=stdout(),
    )


def _layer_count(model: Model) -> str:
    return f"{model.layers}+{model.decoder_layers}" if model.decoder_layers else str(model.layers)


def _print_model(name: str, model: Model, details: bool) -> None:
    from repro.model import counts

    psi, is_gpt = total_parameters(model), model.architecture == "gpt"
    published = f", published as {model.published_name}" if model.published_name else ""
    others = ", ".join(alias for alias, name in model_aliases().items() if name == model.name)
    keys = ", ".join(f"{key} {value}" for key, value in model.departures().items())
    flop = ""
    if is_gpt:
        plain = counts.model_flops(model, model.seq, 1) / model.seq
        repeated = counts.hardware_flops(model, model.seq, 1, True) / model.seq
        flop = f"Training: {units.flop(plain)} per token, {units.flop(repeated)} with recomputation."
    parts = (
        (part.replace("_", " "), f"{size:,}", f"{100 * size / psi:.1f}")
        for part, size in parameters_by_part(model).items()
    )
    states = (
        (label, *(units.number(states_bytes(psi, nd, stage) / units.GB) for nd in ZERO_DEGREES))
        for stage, label in enumerate(ZERO_STAGES)
    )
    print_page(
        f"{model.name}: {psi:,} parameters ({units.parameter_count(psi)}{published}).",
        f"Other names: {others}." if others else "",
        f"Architecture: {model.architecture}, {_layer_count(model)} layers, hidden size {model.hidden}, "
        f"{model.heads} heads of size {model.head_width}, MLP {model.ffn_width}, vocabulary {model.vocab}, "
        f"sequence {model.seq}.",
        f"Differences from GPT-2: {keys}." if keys else "",
        flop,
        new_table("part", "parameters", "share (%)", rows=parts),
        new_table("ZeRO stage: memory per GPU (GB)", *(f"{nd} GPUs" for nd in ZERO_DEGREES), rows=states),
        f"FLOP formula: {counts.flops_formula(model)}." if details and is_gpt else "",
        f"Source: {model.source}" if details and model.source else "",
        f"Note: {model.note}" if details and model.note else "",
        "" if details else "--details shows sources and formulas.",
        command=f"repro plan --model {name} --system dgx-a100 --gpus 8" if is_gpt else "",
    )


BETWEEN_NODES = "inter-node"
UNKNOWN_NUMBER = "?"
SIGNIFICANT_DIGITS = 4
"""Number of significant digits of the printed properties of systems."""


def print_systems(name: str, json: bool, details: bool = False) -> int:
    """Print all systems, or all properties of the system `name` (a name or a file). Raises `ConfigError`."""
    systems = [load_system(name)] if name else [load_system(each) for each in system_names()]
    if json:
        described = [describe_system(system) for system in systems]
        print_json(described[0] if name else described)
    elif name:
        _print_system(name, systems[0], details)
    else:
        _print_all_systems(sorted(systems, key=lambda system: system.name not in REPORT_SYSTEMS), details)
    return 0


def describe_system(system: System) -> dict[str, Any]:
    """Return the properties of a system as JSON data; unknown values are null."""
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
    """Return the bandwidth of a link in GB/s per device as text: `?` if unknown, `-` if the system has no such link."""
    if link not in system.links:
        return "-"
    devices, value = system.devices_per_node.value, system.links[link].bandwidth.value
    if value is None or (system.links[link].per == "node" and devices is None):
        return UNKNOWN_NUMBER
    return _number(system.link_per_device(link), units.GB)


def _print_all_systems(systems: list[System], details: bool) -> None:
    """Print a row per system; without `details`, only this machine, systems of reproduced reports and aliased ones."""
    # The width of the table is limited to 80 columns.
    headings = ("devices\nper node", "memory\n(GB)", "fp16\n(TFLOP/s)", "nvlink\n(GB/s)", "network\n(GB/s)")
    names = ("system", "other names", "device")
    rows = new_table(*names, *headings, left=3, wrap=names[1:], gap=1)
    common = {*REPORT_SYSTEMS, *system_aliases().values(), LOCAL}
    others = [] if details else [system.name for system in systems if system.name not in common]
    for system in (system for system in systems if system.name not in others):
        device = system.device
        peak = device.peak_flops.get("fp16")
        rows.add_row(
            system.name,
            ", ".join(alias for alias, name in system_aliases().items() if name == system.name),
            re.sub(r"^NVIDIA | \(.*|AMD Instinct ", "", device.name),
            _number(system.devices_per_node.value),
            _number(device.memory_bytes.value, units.GB),
            _number(peak.value if peak else None, units.TERA),
            *(_bandwidth(system, link) for link in ("nvlink", BETWEEN_NODES)),
        )
    print_page(
        f"{len(systems)} systems. The reproduced reports used the first {len(REPORT_SYSTEMS)}.",
        rows,
        f"Other systems, which --details lists: {', '.join(others)}." if others else "",
        f"Bandwidth is per device and direction; {UNKNOWN_NUMBER}: unknown. Next: repro systems NAME or FILE.toml.",
    )


def _print_system(name: str, system: System, details: bool) -> None:
    """Print the properties of a system as a table; `details`: also the inputs of the time model, and all sources."""
    device = system.device
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    known = device.memory_bytes.value is not None
    power, price = device.power_w.value, device.price_per_hour.value
    rows = [
        _row("devices per node", system.devices_per_node, _number),
        _row("nodes", system.nodes, _number),
        _row("device memory", device.memory_bytes, _size),
        _row("memory outside the allocator", system.context_used, _size),
        _row("memory bandwidth", device.memory_bandwidth, _bytes_per_s),
        *(_row(f"{precision} peak", peak, _flop_rate) for precision, peak in device.peak_flops.items()),
        *(
            _row(f"{name} bandwidth", link.bandwidth, _bytes_per_s, f" per {link.per}")
            for name, link in system.links.items()
        ),
        _row("host memory of a node", system.host_memory_bytes, _size),
        *[_row("maximum node power, per device", device.power_w, "{:,g} W".format)] * (power is not None),
        *[_row("price of a device for one hour", device.price_per_hour, "${:g}".format)]
        * (price is not None),
        *(_time_rows(system) if details else ()),
    ]
    headings = ("property", "value (range)")
    print_page(
        f"{system.name}: {device.name}{capability}.",
        f"Memory for tensors: {_size(system.allocatable_bytes())} per device." if known else "",
        new_table(*headings, left=2, wrap=headings, rows=(row[:2] for row in rows)),
        *(f"{label}: {source}" for label, _, source in rows if details),
        *(_describe_measured(system) if details else ()),
        f"Note: {system.note}" if system.note and details else "",
        "" if details else "--details lists the source of each number, and the inputs of the time model.",
        command=f"repro plan --model gpt2-1.5b --system {name} --gpus 8",
    )


def _row(
    label: str, quantity: Quantity, words: Callable[[float], str], after: str = ""
) -> tuple[str, str, str]:
    """Return label, value with its range, and source of a system's property; an unknown value is `unknown`."""
    value_text = "unknown" if quantity.value is None else words(quantity.value)
    if quantity.ranges:
        low, _, high = quantity.ends
        value_text += f" ({words(low)} to {words(high)})"
    return label, value_text + after, quantity.source


_size = partial(units.size, digits=SIGNIFICANT_DIGITS)
_flop_rate = partial(units.flop_rate, digits=SIGNIFICANT_DIGITS)
_seconds = partial(units.seconds, digits=SIGNIFICANT_DIGITS)


def _bytes_per_s(value: float) -> str:
    return f"{_size(value)}/s"


FORMATS_BY_ENDING: dict[str, Callable[[float], str]] = {
    "_s": _seconds,
    "efficiency": lambda value: f"{units.percent(value)} of peak",
    "overlap_cost": units.percent,
    "spread": units.percent,
    "_bytes": _size,
    "_flops": _flop_rate,
}
"""Functions that format inputs of the time model as text, by the ending of the input's key; other inputs are counts."""
SHOWN_LINK_KEYS = ("latency_s", "efficiency")
"""Keys of each link that are printed even if the system's file omits them and defaults apply."""
NETWORK_KEYS = ("adapters", "rings")
"""Keys of links between nodes that are printed even if the system's file omits them and defaults apply."""


def _time_rows(system: System) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and source of each property of a system that the time model reads."""
    time = system.device.time
    used = {field.name: time.used(field.name) for field in dataclasses.fields(time)}
    for name, link in system.links.items():
        always = (*SHOWN_LINK_KEYS, *NETWORK_KEYS) if name == BETWEEN_NODES else SHOWN_LINK_KEYS
        for key in KEYS:
            if key in always or getattr(link, key).value is not None:
                used[f"{name} {key}"] = link.used(name, key)
    for label, quantity in used.items():
        words = next((words for end, words in FORMATS_BY_ENDING.items() if label.endswith(end)), _number)
        yield _row(label.replace("_", " ").removesuffix(" s"), quantity, words)


def _describe_measured(system: System) -> Iterator[str]:
    """Yield lines about the measured operators and collectives in a system file of `repro calibrate`."""
    made = system.provenance
    if made is None:
        return
    facts = "".join(f"; {key} {value}" for key, value in made.facts.items())
    yield f"measured on {made.date} with torch {made.torch}, {made.ranks} ranks, {made.repeats} repeats{facts}"
    for name, rate in system.device.operators.items():
        fixed, per_byte, per_flop = map(_seconds, (rate.fixed_s, rate.per_byte_s, rate.per_flop_s))
        yield f"{name}: {fixed} + {per_byte} per byte + {per_flop} per FLOP"
    for link, measured in system.links.items():
        for operation, collective in measured.collectives.items():
            for found in (collective, *collective.groups):
                ends = (f"{_size(size)} in {_seconds(s)}" for size, s in (found.points[0], found.points[-1]))
                ranks = f"{found.ranks or made.ranks} ranks" + f" {found.stride} apart" * (found.stride > 1)
                yield f"{link} {operation}, {ranks}: {len(found.points)} message sizes, {' to '.join(ends)}"
