"""Correspondence of this suite's configuration keys with a framework's options, to write and to read its options.

For a key that no option of the framework sets, `limits` contains the framework's fixed value and a reason. A layout
that is written and read again is equal except for such keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from repro.config import Experiment, Layout, Model, Training
from repro.config.errors import ConfigError, require
from repro.config.model import DEPARTURES

Settings = dict[str, Any]
"""Values of an experiment by configuration key, for example `layout.tp`, `model.layers` and `training.lr`."""
SIZES = {"ffn": "ffn_width", "head_dim": "head_width", "kv_heads": "key_heads"}
"""For each key of a model file that may be 0 (derived from other sizes), the `Model` property with the actual size."""
HEAD_WIDTH = "hidden/heads"
"""Value that represents `model.head_dim` in frameworks without an option for the head width (hidden / heads)."""
MODEL_KEYS = ("layers", "hidden", "heads", "vocab", *SIZES, *(key for key in DEPARTURES if key not in SIZES))
TRAINING_KEYS = (
    *("seq", "steps", "seed", "lr", "min_lr", "warmup_steps", "schedule", "weight_decay"),
    *("beta1", "beta2", "eps", "clip", "dropout", "attention_dropout"),
)
SCALING_KEYS = ("loss_scale", "loss_scale_window", "loss_scale_hysteresis")
"""Configuration keys of loss scaling, which have an effect in fp16 training only."""
_TYPES = {
    f"{part}.{key.name}": key.type
    for part, kind in (("layout", Layout), ("model", Model), ("training", Training))
    for key in fields(kind)
}


def settings_of(experiment: Experiment) -> Settings:
    """Return the experiment's values that a framework's options must express, by key, and the `Model` as `model`."""
    layout, model, training = experiment.layout, experiment.model, experiment.training
    found: Settings = {f"layout.{key.name}": getattr(layout, key.name) for key in fields(Layout)}
    for key in MODEL_KEYS:
        if not key.startswith("rotary_") or model.positions == "rotary":
            found[f"model.{key}"] = getattr(model, SIZES.get(key, key))
    if model.positions == "learned":
        found["model.seq"] = model.seq
    keys = TRAINING_KEYS + (SCALING_KEYS if layout.precision == "fp16" else ())
    found |= {f"training.{key}": getattr(training, key) for key in keys}
    return found | {"training.seq": experiment.seq, "model": model}


@dataclass
class Reading:
    """Configuration keys of this suite that the options of a framework's file determine, collected option by option."""

    gpus: int
    given: Settings
    """Values of keys that the user specified, which take precedence over the framework's file."""
    settings: Settings = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    """Notes on options of the framework's file that a prediction does not represent exactly."""
    unread: list[str] = field(default_factory=list)
    """Names of options that correspond to no key of this suite."""

    def put(self, key: str, value: Any) -> None:
        """Set a configuration key to `value`, or to the user's value if the user specified the key."""
        self.settings[key] = self.given.get(key, value)

    def layout(self, key: str) -> Any:
        """Return the value of layout key `key` from the framework's options read up to now, or the key's default."""
        return self.settings.get(f"layout.{key}", getattr(Layout, key))

    @property
    def dp(self) -> int:
        """Return the data-parallel degree, GPUs / (tp * pp * cp), at least 1."""
        return max(1, self.gpus // (self.layout("tp") * self.layout("pp") * self.layout("cp")))

    def put_parts(self, chunks: int, stage_layers: tuple[int, ...] = ()) -> None:
        """Set the number of chunks per pipeline stage, the schedule that it requires, and the layers of each chunk."""
        self.put("layout.chunks", chunks)
        self.put("layout.stage_layers", stage_layers)
        if chunks > 1:
            self.put("layout.schedule", "interleaved")

    def model(self, name: str) -> Model | None:
        """Return the model that a framework's file describes; None if the file lacks the model's sizes."""
        keys = {key[6:]: value for key, value in self.settings.items() if key.startswith("model.")}
        if not {"layers", "hidden", "heads", "vocab"} <= keys.keys():
            return None
        hidden, heads = keys["hidden"], keys["heads"]
        defaults = {"ffn": (4 * hidden,), "head_dim": (hidden / heads, HEAD_WIDTH), "kv_heads": (heads,)}
        for key, values in defaults.items():
            if keys.get(key) in values:
                del keys[key]
        if keys.get("positions") != "rotary":
            keys = {key: value for key, value in keys.items() if not key.startswith("rotary_")}
        return Model(**{"name": name, "seq": self.settings.get("training.seq", 0), **keys})


class Rule(NamedTuple):
    """Conversion between one option of a framework and keys of this suite."""

    write: Callable[[Settings], Any]
    """Function that returns the option's value for an experiment's settings; a result of None omits the option."""
    read: Callable[[Any, Reading], None] | None = None
    """Function (option's value or None, result) that sets keys of this suite in the result; None if there are none."""


def converted(name: str, key: str, value: Any) -> Any:
    """Return a framework option's value in the type of this suite's key `key`. Raises `ConfigError` for other types."""
    kind = _TYPES[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "bool":
        require(isinstance(value, bool), name, value, "true or false")
    elif kind == "int":
        require(is_number and value == int(value), name, value, "an integer")
        return int(value)
    else:
        require(is_number, name, value, "a number")
    return value


def rule_of(row: Mapping[str, Any]) -> Rule:
    """Return the conversion of one framework option, given as a TOML row with a key of this suite or a fixed value."""
    name, key, default, when = row["name"], row.get("key", ""), row.get("default"), row.get("when")
    pairs = [(ours, *theirs, None)[:2] for ours, *theirs in row.get("words", ())]
    near, other = row.get("near", ()), row.get("other")
    fixed = row.get("value", row.get("example"))

    def write(settings: Settings) -> Any:
        if when is not None and settings[when[0]] not in when[1:]:
            return None
        if not key:
            return fixed
        value = settings.get(key, settings.get(row.get("fallback", key)))
        if row.get("sparse") and value == default:
            return None
        return next((theirs for ours, theirs in pairs if ours == value), other) if pairs else value

    def read(value: Any, reading: Reading) -> None:
        value = default if value is None else value
        exact = [ours for ours, theirs in pairs if theirs == value or (theirs is None and value is False)]
        close = [ours for theirs, ours in near if theirs == value]
        if exact or close:
            reading.put(key, (exact or close)[0])
            if not exact and key.startswith("layout."):
                reading.remarks.append(f"{name} = {value} is predicted as {key} = {close[0]}")
        elif value is None or (pairs and value is False):
            return
        elif pairs:
            right = ", ".join(
                str(theirs) for theirs in (*(pair[1] for pair in pairs), *(n[0] for n in near)) if theirs
            )
            raise ConfigError(name, value, f"one of {right}")
        elif key:
            reading.put(key, converted(name, key, value))
        elif "value" in row and value != fixed:
            reading.remarks.append(f"{name} = {value} is predicted as {fixed}")

    return Rule(write, read)


@dataclass(frozen=True)
class Framework:
    """Options of one version of a framework, for example DeepSpeed, and their conversion to this suite's keys."""

    name: str
    version: str
    file: str
    """Name of the written configuration file that contains the framework's options."""
    rules: Mapping[str, Rule]
    """Conversion rules of the framework's options by name, in the order in which options are written and read."""
    notes: Mapping[str, str]
    """Comments on options in the written configuration file, by option name."""
    limits: Mapping[str, tuple[Any, str]]
    """(the framework's value, reason) of each key of this suite that the framework's options cannot set freely."""
    ignored: frozenset[str]
    """Names of the framework's options that have no effect on memory and time of a step."""
    code: tuple[str, ...]
    """Parts of an experiment (`model`, `training`) that the framework defines in code, not configuration files."""
    files: Mapping[str, str]
    """Templates of launch scripts and configuration files by file name, with placeholders such as `@nodes@`."""
    command: str
    """Training script and its arguments, which follow the options of torchrun."""
    environment: str
    """Shell commands that the launch script runs before torchrun."""

    def options_of(self, settings: Settings) -> dict[str, Any]:
        """Return the framework's options, by name, that express an experiment with the configuration `settings`."""
        found = {name: rule.write(settings) for name, rule in self.rules.items()}
        return {name: value for name, value in found.items() if value is not None}

    def read(self, options: Mapping[str, Any], gpus: int, given: Settings) -> Reading:
        """Return the keys of this suite that a framework's options determine. Raises `ConfigError`."""
        reading = Reading(gpus, given)
        reading.put_parts(1)
        for key, (value, _) in self.limits.items():
            if key.partition(".")[0] not in self.code:
                reading.put(key, value)
        reading.settings |= given
        for name, rule in self.rules.items():
            if rule.read is not None:
                rule.read(options.get(name), reading)
        reading.settings.setdefault("layout.dp", reading.dp)
        reading.unread = [name for name in options if name not in {*self.rules, *self.ignored}]
        return reading

    def differences(self, experiment: Experiment) -> list[str]:
        """Return one line for each key that the framework cannot express, with the framework's value and a reason."""
        settings = settings_of(experiment)
        found = {key: value for key, value in settings.items() if key.partition(".")[0] in self.code}
        found |= {key: value for key, (value, _) in self.limits.items() if key.partition(".")[0] in self.code}
        given = {"model": settings["model"]}
        found |= self.read(self.options_of(settings), experiment.layout.world, given).settings
        if found.get("model.head_dim") == HEAD_WIDTH:
            found["model.head_dim"] = experiment.model.hidden // experiment.model.heads
        return [
            f"{key} = {_text(value)}: {self.name} uses {_text(found.get(key))}, because {self.limits[key][1]}."
            for key, value in settings.items()
            # `dp` is no option: the number of devices and the other degrees determine it.
            if key not in ("model", "layout.dp") and found.get(key) != value
        ]


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else str(list(value) if isinstance(value, tuple) else value)
    )
