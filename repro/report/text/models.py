"""`repro models`: every model file, its exact parameter count and the memory of its model states."""

from __future__ import annotations

import dataclasses
from typing import Any

from repro.config.model import Model
from repro.config.models import load, names
from repro.model.parameters import count, total
from repro.model.states import states_bytes
from repro.util import units
from repro.util.console import print_json, stdout
from repro.util.table import table

ZERO_DEGREES = (1, 4, 16, 64, 256, 1024)
"""Data-parallel degrees Nd of the ZeRO paper's Table 1."""
ZERO_STAGES = ("0  DP", "1  P_os", "2  P_os+g", "3  P_os+g+p")


def print_models(name: str | None, json: bool) -> int:
    """Print all models, or all about one.  Raises `ConfigError` for an unknown name or a wrong file."""
    models = [load(name)] if name else [load(each) for each in names()]
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
    from repro.model import flops

    gpt = model.architecture == "gpt"
    psi = total(model)
    return {
        **dataclasses.asdict(model),
        "ffn": model.ffn_width,
        "head_dim": model.head_width,
        "parameters": psi,
        "parameters_by_part": count(model),
        "states_bytes": {
            f"zero{stage}": {str(nd): states_bytes(psi, nd, stage) for nd in ZERO_DEGREES}
            for stage in range(4)
        },
        "model_flops_per_token": flops.model_flops(model, model.seq, 1) // model.seq if gpt else None,
        "hardware_flops_per_token_recompute": (
            flops.hardware_flops(model, model.seq, 1, True) // model.seq if gpt else None
        ),
        "flops_formula": flops.formula(model) if gpt else "",
    }


def _print_all_models(models: list[Model]) -> None:
    headings = ("model", "layers", "hidden", "heads", "vocab", "parameters", "printed", "states\nGB")
    rows = table(*headings, gap=1)  # narrow enough for 80 columns, so that no name or count is cut
    for model in models:
        psi = total(model)
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
    from repro.model import flops

    console = stdout()
    psi = total(model)
    published = f", published as {model.published_name}" if model.published_name else ""
    console.print(
        f"[bold]{model.name}[/]: {model.architecture}, {psi:,} parameters ({units.parameters(psi)}{published})"
    )
    console.print(
        f"{_layer_count(model)} layers, hidden {model.hidden}, {model.heads} heads of width {model.head_width}, "
        f"MLP {model.ffn_width},\nvocabulary {model.vocab}, sequence {model.seq}\n"
    )
    if other := model.departures():
        keys = ", ".join(f"{key} {value}" for key, value in other.items())
        console.print(f"Not as in GPT-2: {keys}\n", markup=False)
    parts = table("part", "parameters", "share")
    for part, size in count(model).items():
        parts.add_row(part.replace("_", " "), f"{size:,}", units.percent(size / psi))
    console.print(parts)

    console.print("\nModel states per device in GB (mixed-precision Adam, K = 12) by degree Nd")
    states = table("stage", *map(str, ZERO_DEGREES))
    for stage, label in enumerate(ZERO_STAGES):
        states.add_row(label, *(units.number(states_bytes(psi, nd, stage) / units.GB) for nd in ZERO_DEGREES))
    console.print(states)

    if model.architecture == "gpt":
        plain = flops.model_flops(model, model.seq, 1) / model.seq
        repeated = flops.hardware_flops(model, model.seq, 1, True) / model.seq
        console.print(f"\n{units.flop(plain)} per token, {units.flop(repeated)} with recomputation")
        console.print(flops.formula(model).replace("; ", ";\n"))
    for label, text in (("source", model.source), ("note", model.note)):
        if text:
            console.print(f"{label}: {text}", markup=False)
