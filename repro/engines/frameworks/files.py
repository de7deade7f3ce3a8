"""Files of frameworks: their formats, the scripts that launch them, and the experiment of a user's file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from repro.config import Experiment, Layout, Model, Training, models
from repro.config.errors import ConfigError, require
from repro.config.files import read_toml
from repro.engines.frameworks.table import Framework, Reading, load_framework, settings_of

ENDINGS = {".sh": "megatron", ".toml": "torchtitan", ".json": "deepspeed", ".yaml": "nanotron", ".yml": "nanotron"}
"""Framework of a file, by the ending of its name."""
COMMANDS = {
    "megatron": '"${MEGATRON_LM:?set it to the folder of Megatron-LM}/pretrain_gpt.py" "${ARGUMENTS[@]}"',
    "torchtitan": "-m torchtitan.train --job.config_file torchtitan.toml",
    "deepspeed": "train.py",
    "nanotron": '"${NANOTRON:?set it to the folder of nanotron}/run_train.py" --config-file nanotron.yaml',
}
"""Arguments of torchrun."""


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dots in their names as tables in tables."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        *tables, last = name.split(".")
        table = found
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return found


def flattened(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return tables in tables as options with dots in their names."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def parse_options(path: Path) -> dict[str, Any]:
    """Return the options of a file by name. Raises `ConfigError`."""
    require(path.suffix in ENDINGS, "--from", str(path), f"a file that ends in {', '.join(ENDINGS)}")
    if path.suffix == ".toml":
        return flattened(read_toml(path))
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".sh":
            return parse_arguments(text)
        if path.suffix == ".json":
            tables = json.loads(text)
        else:
            import yaml

            tables = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--from", str(path), says=f"cannot be read: {error}") from None
    except Exception as error:
        if isinstance(error, ImportError):
            raise
        raise ConfigError("--from", str(path), says=f"is not {path.suffix[1:].upper()}: {error}") from None
    require(isinstance(tables, dict), "--from", str(path), "a file of tables")
    return flattened(tables)


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the options in a shell script or a list of arguments, with the variables that the script assigns."""
    assignment = re.compile(r"^\s*(?:export\s+)?(\w+)=([^\s()]+)\s*$", re.MULTILINE)
    values = {name: value.strip("\"'") for name, value in assignment.findall(text)}

    def value_of(found: re.Match[str]) -> str:
        return values.get(found[1] or found[3], found[0] if found[2] is None else found[2])

    for _ in range(3):  # values with variables
        text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value_of, text)
    text = re.sub(r"^\s*\w+\+?=\(|^\s*\)\s*$", " ", text.replace("\\\n", " "), flags=re.MULTILINE)
    found: dict[str, Any] = {}
    name = ""
    for token in shlex.split(text, comments=True):
        if token.startswith("--") and len(token) > 2:
            name, _, value = token[2:].replace("-", "_", token.partition("=")[0].count("-") - 2).partition("=")
            found[name] = _number(value) if value else True
        elif name and found[name] is True and not token.startswith("$"):
            found[name] = _number(token)
        else:
            name = ""
    return found


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_experiment(
    path: Path, gpus: int, given: Mapping[str, Any], model: str = "", seq: int = 0
) -> tuple[Experiment, Reading]:
    """Return the experiment of a framework's file on `gpus` devices; `given` keys of the layout take precedence.

    `model`: name of the model, for files that do not have its sizes. Raises `ConfigError`.
    """
    options = parse_options(path)
    framework = load_framework(ENDINGS[path.suffix])
    settings = {f"layout.{key}": value for key, value in given.items()}
    settings |= {"training.seq": seq} if seq else {}
    if model:
        settings["model"] = models.load_model(model)
    try:
        reading = framework.read(options, gpus, settings)
        found: Model | None = reading.settings.get("model") or reading.model(path.stem)
        if found is None:
            raise ConfigError("model", says="is not in the file: give --model")
        layout = Layout(**_keys(reading, "layout", Layout))
        require(layout.world == gpus, "--gpus", gpus, f"{layout.world}, the product of the degrees of the file")
        training = _keys(reading, "training", Training)
        if training.get("seq") == 0:
            del training["seq"]
        training["untimed_steps"] = 1
        training["steps"] = max(2, training.get("steps", 2))
        experiment = Experiment(name="simulate", model=found, layout=layout, training=Training(**training))
    except ConfigError as error:
        raise error.within(file=str(path)) from None
    return experiment, reading


def _keys(reading: Reading, part: str, kind: Any) -> dict[str, Any]:
    names = {key.name for key in fields(kind)}
    found = {key.partition(".")[2]: value for key, value in reading.settings.items() if key.startswith(f"{part}.")}
    return {key: value for key, value in found.items() if key in names}


def write_files(key: str, experiment: Experiment, per_node: int, folder: Path) -> list[Path]:
    """Write the framework's files for an experiment on nodes of `per_node` devices; return their paths."""
    framework, layout = load_framework(key), experiment.layout
    options = framework.options_of(settings_of(experiment))
    degrees = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in layout.axes)
    head = [
        f"{experiment.model.name} on {layout.world} devices ({degrees}) for {framework.name} {framework.version}.",
        *(framework.differences(experiment) or ["This file expresses every key of the layout, model and training."]),
    ]
    comment = "".join(f"# {line}\n" for line in head)
    nodes = -(-layout.world // per_node)
    launcher = [
        f"# On one node: bash launch.sh. With SLURM: srun --nodes {nodes} --ntasks-per-node 1 bash launch.sh",
        "set -euo pipefail",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1" if key == "megatron" and layout.zero < 2 else "",
        'if [ -n "${SLURM_JOB_NODELIST:-}" ]; then',
        '  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "fi",
        f"exec torchrun --nnodes {nodes} --nproc-per-node {min(per_node, layout.world)} \\",
        '  --node-rank "${SLURM_NODEID:-0}" --master-addr "${MASTER_ADDR:-localhost}" \\',
        f'  --master-port "${{MASTER_PORT:-29500}}" {COMMANDS[key]}',
    ]
    script = "\n".join(line for line in launcher if line) + "\n"
    texts = {"launch.sh": f"#!/usr/bin/env bash\n{comment}{script}"}
    if key == "megatron":
        arguments = "\n".join(_argument_lines(framework, options))
        texts = {framework.file: f"#!/usr/bin/env bash\n{comment}ARGUMENTS=(\n{arguments}\n)\n{script}".replace("launch.sh", framework.file)}
    elif key == "deepspeed":
        texts[framework.file] = json.dumps(nested(options), indent=2) + "\n"
        texts["train.py"] = f"{comment}{_deepspeed_code(experiment)}"
    else:
        lines = _toml_lines if key == "torchtitan" else _yaml_lines
        texts[framework.file] = comment + "\n".join(lines(framework, options)) + "\n"
    if options.get("experimental.custom_import"):
        texts["repro_model.py"] = _torchtitan_code(experiment.model)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _argument_lines(framework: Framework, options: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in framework.rules:
        if name in framework.notes:
            lines.append(f"  # {framework.notes[name]}")
        if name in options:
            value = options[name]
            lines.append(f"  --{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}"))
    return lines


def _scalar(value: Any) -> str:
    """Return a value as JSON, which TOML and YAML read too if a float has a point."""
    return re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(value))


def _with_note(framework: Framework, name: str, line: str) -> str:
    return f"{line}  # {framework.notes[name]}" if name in framework.notes else line


def _toml_lines(framework: Framework, options: Mapping[str, Any]) -> list[str]:
    lines = []
    for table in dict.fromkeys(name.rpartition(".")[0] for name in options):
        lines += ["", f"[{table}]"]
        for name, value in options.items():
            if name.rpartition(".")[0] == table:
                lines.append(_with_note(framework, name, f"{name.rpartition('.')[2]} = {_scalar(value)}"))
    return lines


def _yaml_lines(framework: Framework, options: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []

    def add(tables: Mapping[str, Any], prefix: str) -> None:
        for key, value in tables.items():
            indent = "  " * prefix.count(".")
            if isinstance(value, dict):
                lines.append(f"{indent}{key}:")
                add(value, f"{prefix}{key}.")
            else:
                lines.append(_with_note(framework, prefix + key, f"{indent}{key}: {_scalar(value)}"))

    add(nested(options), "")
    return lines


def _deepspeed_code(experiment: Experiment) -> str:
    training, layout = experiment.training, experiment.layout
    mpu = ", mpu=mpu" if layout.tp > 1 else ""
    return f'''
import deepspeed
import torch
from my_model import batches, build_model{", mpu" if mpu else ""}  # your code; the model returns the loss

model = build_model()  # {experiment.model.name}
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{{"params": matrices, "weight_decay": {training.weight_decay}}}, {{"params": vectors, "weight_decay": 0.0}}],
    lr={training.lr},
    betas=({training.beta1}, {training.beta2}),
    eps={training.eps},
    fused=True,
)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer{mpu}, config="deepspeed.json")
for step in range({training.steps}):
    for tokens, targets in batches(step):  # {layout.accumulation} of {layout.micro_batch} x {experiment.seq} tokens
        engine.backward(engine(tokens, targets))
        engine.step()
'''


def _torchtitan_code(model: Model) -> str:
    factor = min(1.0, model.ffn_width / (8 * model.hidden / 3)) / 2
    return f'''"""{model.name} as a flavor of torchtitan's llama3."""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

llama3_args["{model.name}"] = TransformerModelArgs(
    dim={model.hidden},
    n_layers={model.layers},
    n_heads={model.heads},
    n_kv_heads={model.key_heads},
    vocab_size={model.vocab},
    multiple_of={model.ffn_width},  # width of the MLP, to which torchtitan rounds up
    ffn_dim_multiplier={factor:.6g},
    norm_eps={model.norm_eps},
    rope_theta={model.rotary_base},
)
'''
