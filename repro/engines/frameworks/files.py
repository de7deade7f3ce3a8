"""Formats of frameworks' configuration files, their launch scripts, and the experiment that a user's file describes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from repro.config import Experiment, Layout, Model, Training, models
from repro.config.errors import ConfigError, require
from repro.config.files import read_toml
from repro.engines.frameworks.rules import load_framework
from repro.engines.frameworks.table import Framework, Reading, settings_of

ENDINGS = {
    ".sh": "megatron",
    ".toml": "torchtitan",
    ".json": "deepspeed",
    ".yaml": "nanotron",
    ".yml": "nanotron",
}
"""Framework to which a configuration file belongs, by the ending of the file's name."""
LAUNCHER = """\
# On one node: bash launch.sh. With SLURM: srun --nodes @nodes@ --ntasks-per-node 1 bash launch.sh
set -euo pipefail
@environment@
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
exec torchrun --nnodes @nodes@ --nproc-per-node @per_node@ --node-rank "${SLURM_NODEID:-0}" \\
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \\
  @command@
"""


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries for a flat dictionary of options with dotted names (`a.b`)."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        *tables, last = name.split(".")
        table = found
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return found


def flattened(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a flat dictionary with dotted names (`a.b`) for nested dictionaries of options."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def parse_options(path: Path) -> dict[str, Any]:
    """Return the options of a framework's configuration file by name. Raises `ConfigError` for invalid files."""
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

            try:
                tables = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(error) from None
    except (OSError, ValueError) as error:
        says = f"the file cannot be read as {path.suffix[1:].upper()}: {error}"
        raise ConfigError("--from", str(path), says=says) from None
    right = "a file whose top level maps names of options to values"
    require(isinstance(tables, dict), "--from", str(path), right)
    return flattened(tables)


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the command-line options in a shell script or argument list, with the script's variables substituted."""
    # A variable that contains options (`ARGS="--a 1 --b"`) is replaced by its options.
    text = re.sub(
        r"^\s*\w+=([\"'])([^\"']*--[^\"']*)\1", r" \2 ", text.replace("\\\n", " "), flags=re.MULTILINE
    )
    variable = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
    values: dict[str, str] = {}

    def value_of(found: re.Match[str]) -> str:
        return str(values.get(found[1] or found[3], found[0] if found[2] is None else found[2]))

    assignment = re.compile(r"^\s*(?:export\s+)?(\w+)=([^\s()]+)\s*$", re.MULTILINE)
    for name, value in assignment.findall(text):
        values[name] = variable.sub(value_of, value.strip("\"'"))
    text = variable.sub(value_of, assignment.sub("", text))
    text = re.sub(r"^\s*\w+\+?=\(|^\s*\)\s*$", " ", text, flags=re.MULTILINE)
    found: dict[str, Any] = {}
    name = ""
    for token in shlex.split(text.replace("\n", "\n;\n"), comments=True):
        if re.match(r"--\w", token):
            name, _, value = token[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _number(value) if value else True
        elif name and found[name] is True and token[0:1] not in ("$", ";"):
            found[name] = _number(token)
        else:
            name = ""
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class LaunchFiles:
    """Options of a command that reads or writes configuration files of frameworks (Megatron-LM, DeepSpeed, ...)."""

    source: Path | None = None
    """Configuration file to read the layout from and, for most frameworks, the model; None: no file."""
    framework: str = ""
    """Framework whose configuration files and launch script are written; empty: none."""
    output: Path | None = None
    """Folder in which the framework's files are written; None: no files are written."""

    def check(self, model: str) -> None:
        """Raise `ConfigError` for an unknown framework, a missing model, or only one of `--launch` and `--output`."""
        require(model or self.source, "model", says="no model is given; add --model NAME or --from FILE")
        is_complete = bool(self.framework) == (self.output is not None)
        require(is_complete, "launch", self.framework, says="--launch and --output must be used together")
        if self.framework:
            load_framework(self.framework)

    def read(
        self, model: str, gpus: int, given: Mapping[str, Any], seq: int
    ) -> tuple[Experiment | None, list[str]]:
        """Return the experiment in the framework's file, and notes on options that a prediction ignores or changes."""
        if self.source is None:
            return None, []
        experiment, reading = read_experiment(self.source, gpus, given, model, seq)
        unread = ", ".join(reading.unread)
        return experiment, reading.remarks + [f"options that the prediction ignores: {unread}"] * bool(unread)

    def write(self, experiment: Experiment, per_node: int) -> list[str]:
        """Write the chosen framework's files; return a line with their paths for the user, or [] without framework."""
        if self.output is None:
            return []
        paths = write_files(self.framework, experiment, per_node, self.output)
        count = len(load_framework(self.framework).differences(experiment))
        names = ", ".join(str(path) for path in paths)
        if not count:
            return [f"Wrote {names}, with options for every key of the layout."]
        differ = "1 key differs" if count == 1 else f"{count} keys differ"
        return [f"Wrote {names}. {differ} from the layout; comments in {paths[0].name} give the reasons."]


def read_experiment(
    path: Path, gpus: int, given: Mapping[str, Any], model: str = "", seq: int = 0
) -> tuple[Experiment, Reading]:
    """Return the experiment that a framework's configuration file describes, on `gpus` devices.

    `given`: keys of the layout that take precedence over the file. `model`: name of the model, for files that do not
    contain its sizes. Raises `ConfigError`.
    """
    options = parse_options(path)
    settings = {f"layout.{key}": value for key, value in given.items()}
    settings |= {"training.seq": seq} if seq else {}
    settings |= {"model": models.load_model(model)} if model else {}
    try:
        reading = load_framework(ENDINGS[path.suffix]).read(options, gpus, settings)
        sizes: Model | None = reading.settings.get("model") or reading.model(path.stem)
        if sizes is None:
            raise ConfigError("model", says="the file lacks the sizes of the model; add --model NAME")
        layout = Layout(**_keys(reading, Layout))
        require(layout.world == gpus, "--gpus", gpus, f"{layout.world}, the product of the parallel degrees")
        training = _keys(reading, Training)
        training |= {"untimed_steps": 1, "steps": max(2, training.get("steps", 2))}
        experiment = Experiment(name="simulate", model=sizes, layout=layout, training=Training(**training))
    except ConfigError as error:
        raise error.within(file=str(path)) from None
    return experiment, reading


def _keys(reading: Reading, kind: Any) -> dict[str, Any]:
    names = {f"{kind.__name__.lower()}.{key.name}": key.name for key in fields(kind)}
    return {names[key]: value for key, value in reading.settings.items() if key in names}


def write_files(key: str, experiment: Experiment, per_node: int, folder: Path) -> list[Path]:
    """Write a framework's configuration files and launch script for an experiment; return their paths."""
    framework, model, world = load_framework(key), experiment.model, experiment.layout.world
    settings = settings_of(experiment)
    options = framework.options_of(settings)
    name = f"{framework.name} {framework.version}"
    head = f"This file configures {name} for the training of model {model.name} on {world} devices."
    lines = framework.differences(experiment) or ["The files express all keys of layout, model and training."]
    words = {
        "comment": "".join(f"# {line}\n" for line in (head, *lines)),
        "launcher": LAUNCHER.replace("launch.sh", next(iter(framework.files))),
        "options": "\n".join(_option_lines(framework, options)),
        "command": framework.command,
        "environment": framework.environment,
        "nodes": -(-world // per_node),
        "per_node": min(per_node, world),
        "passes": experiment.layout.accumulation,
        "name": model.name,
        "ffn_factor": min(0.5, model.ffn_width / (8 * model.hidden / 3) / 2),
        "rotary_base": model.rotary_base,
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in framework.files.items():
        if name == "repro_model.py" and "experimental.custom_import" not in options:
            continue
        for word, value in (words | settings).items():
            text = text.replace(f"@{word}@", str(value))
        (folder / name).write_text(text.replace("\n\nif [", "\nif ["), encoding="utf-8")
        written.append(folder / name)
    return written


def _option_lines(framework: Framework, options: Mapping[str, Any]) -> list[str]:
    """Return the lines of the framework's configuration file that set `options`, with comments."""
    ending = Path(framework.file).suffix
    if ending == ".json":
        return json.dumps(nested(options), indent=2).splitlines()
    lines: list[str] = []
    if ending == ".sh":
        for name in framework.rules:
            lines += [f"  # {framework.notes[name]}"] if name in framework.notes else []
            value = options.get(name)
            text = (
                f"{value:g}" if isinstance(value, float) and value == int(value) else shlex.quote(str(value))
            )
            flag = f"  --{name.replace('_', '-')}"
            lines += [] if value is None else [flag] if value is True else [f"{flag} {text}"]
        return lines

    def add(tables: Mapping[str, Any], prefix: str) -> None:
        depth = prefix.count(".") if ending == ".yaml" else 0
        for key, value in tables.items():
            name = prefix + key
            if isinstance(value, dict):
                lines.extend([f"{'  ' * depth}{key}:"] if ending == ".yaml" else ["", f"[{name}]"])
                add(value, f"{name}.")
                continue
            # Values in JSON syntax are valid in TOML and YAML too, if floats have a decimal point.
            text = re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(value))
            note = f"  # {framework.notes[name]}" if name in framework.notes else ""
            lines.append(f"{'  ' * depth}{key}{':' if ending == '.yaml' else ' ='} {text}{note}")

    add(nested(options), "")
    return lines
