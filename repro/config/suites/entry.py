"""Reader of one `[[experiment]]` table of a suite, with its values from `[defaults]`, `[layouts]` and `[networks]`.

A layout may be named once and used by several experiments::

    [layouts.C4]
    zero = 2
    pa = true

    [[experiment]]
    layout = "C4"                                 # the unchanged named layout
    layout = { use = "C4", tp = 16, dp = 25 }     # the named layout with two other keys

Keys of an experiment take precedence over keys of the named layout, and the named layout over `[defaults]`. A key
`software = "megatron-2019"` stands for the settings of that software, over which all other keys take precedence. An
emulated network is named in the same way: `[networks.slow]`, `network = { use = "slow", between = 16e6 }`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from repro.config import (
    ConfigError,
    EmulatedNetwork,
    Experiment,
    Layout,
    Limits,
    Model,
    Training,
    TwinOf,
    engines,
)
from repro.config.errors import require, unknown_name_hint
from repro.config.files import build_dataclass
from repro.config.sizes import check_name

T = TypeVar("T")
OUTCOMES = ("ok", "oom", "diverged", "timeout", "hang", "error")
USE = "use"
_PARTS: dict[str, type[Any]] = {
    "layout": Layout,
    "training": Training,
    "limits": Limits,
    "network": EmulatedNetwork,
    "twin": TwinOf,
}
_OPTIONAL = ("network", "twin")
"""Parts of an experiment's configuration that are None unless the suite file defines them."""
_NAMED = {"layout": "layouts", "network": "networks"}
"""Settings that experiments of a suite file can share by name, such as `layout`, and the tables that define them."""
_DATA = ("synthetic", "shakespeare", "shakespeare-gpt2")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One experiment of a suite, with the name of its launch and its expected outcome."""

    experiment: Experiment
    launch: str = ""
    """Name of a launch; experiments with equal names run in the same processes, one after another. Empty: separate."""
    expect: str = "ok"
    """Outcome that counts as success, such as `oom` if a claim says so; empty: every outcome is a success."""


class Shared(NamedTuple):
    """Settings that all experiments of one suite file share."""

    file: str
    defaults: Mapping[str, Any]
    named: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Named layouts and emulated networks of the suite file: the tables `layouts` and `networks`, each by name."""
    models: Mapping[str, Model]
    """Models that the suite file defines in tables `[models.NAME]`, by name."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Table `[[experiment]]` or `[defaults]` of a suite file, before it is combined with other tables."""

    name: str = ""
    model: str = ""
    engine: str = "native"
    system: str = "local"
    launch: str = ""
    expect: str = "ok"
    layout: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    twin: dict[str, Any] = field(default_factory=dict)


class _Level(NamedTuple):
    """Settings that one table of a suite file gives to one part of an experiment, and the name of the table."""

    where: str
    table: Mapping[str, Any]


def shared(data: Mapping[str, Any], file: str) -> Shared:
    """Return the shared tables of a suite file: `[defaults]`, `[layouts]`, `[networks]` and `[models]`.

    Unknown keys raise `ConfigError` here. Values, except those of `[models]`, are checked in each experiment.
    """
    named = {tables: data.get(tables, {}) for tables in _NAMED.values()}
    for part, tables in _NAMED.items():
        if not isinstance(named[tables], dict):
            raise ConfigError(tables, named[tables], f"tables [{tables}.NAME]", file=file)
        for name, table in named[tables].items():
            if not isinstance(table, dict):
                raise ConfigError(name, table, f"a table with {part} settings", file=file, where=tables)
            for key, value in table.items():
                _known(key, value, _PARTS[part], file=file, where=f"{tables}.{name}")
    defaults = data.get("defaults", {})
    defaults = _spelled(defaults, file)
    build_dataclass(_Row, defaults, file=file, where="defaults")
    if "name" in defaults:
        right = "given in each [[experiment]] table, since names must differ"
        raise ConfigError("name", defaults["name"], right, file=file, where="defaults")
    for part, cls in _PARTS.items():
        for key, value in defaults.get(part, {}).items():
            if key != USE or part not in _NAMED:
                _known(key, value, cls, file=file, where=f"defaults.{part}")
    return Shared(file, defaults, named, _models(data.get("models", {}), file))


def _models(tables: Any, file: str) -> dict[str, Model]:
    if not isinstance(tables, dict):
        raise ConfigError("models", tables, "tables [models.NAME]", file=file)
    return {
        name: build_dataclass(
            Model,
            {"name": name, **table} if isinstance(table, dict) else table,
            file=file,
            where=f"models.{name}",
        )
        for name, table in tables.items()
    }


def read_entry(data: Any, from_file: Shared, number: int) -> Entry:
    """Return the experiment of the `number`-th [[experiment]] table of a suite; raise `ConfigError` if invalid."""
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("name", says=f"is missing in [[experiment]] number {number}", file=from_file.file)
    try:
        check_name("name", name)
    except ConfigError as error:
        raise error.within(file=f"{from_file.file}: [[experiment]] number {number}") from None
    place = f'{from_file.file}: experiment "{name}"'
    data, defaults = _spelled(data, place), from_file.defaults
    for section in _PARTS:
        if not isinstance(data.get(section, {}), dict):
            raise ConfigError(section, data[section], "a table", file=place)
    row = build_dataclass(
        _Row, {**defaults, **{k: v for k, v in data.items() if k not in _PARTS}}, file=place
    )
    require(row.model, "model", says="is missing: add the name of a model of `repro models`", file=place)
    if row.expect and row.expect not in OUTCOMES:
        right = f'one of {", ".join(OUTCOMES)}, or "" for any outcome'
        raise ConfigError("expect", row.expect, right, file=place)
    _system(row.system, place)
    levels = {key: _levels(key, data, from_file, place) for key in _PARTS}

    def blame(error: ConfigError, part: str) -> ConfigError:
        """Return a copy of the error that names the table of the suite file with the invalid value."""
        found = [level.where for level in levels.get(part, []) if error.key in level.table]
        where = found[-1] if found else error.where or part
        return error.for_key(error.key, file=place, where=where)

    def part(key: str) -> Any:
        table: dict[str, Any] = {}
        for level in levels[key]:
            table |= level.table
        world = table.pop("world", None) if key == "layout" else None
        built = _blaming(
            lambda: build_dataclass(_PARTS[key], engines.with_software(table), where=key),
            lambda error: blame(error, key),
        )
        if world is not None and world != built.world:
            degrees = " x ".join(str(getattr(built, axis)) for axis in built.axes)
            right = f"{' x '.join(built.axes)} = {degrees} = {built.world}"
            raise blame(ConfigError("world", world, right, where=key), key)
        return built

    model = from_file.models.get(row.model) or _model(row.model, file=from_file.file, place=place)
    named = [key for key in _PARTS if key not in _OPTIONAL or any(level.table for level in levels[key])]
    parts = {key: part(key) for key in named}
    _blaming(lambda: _data(parts["training"], model), lambda error: blame(error, "training"))
    experiment = _blaming(
        lambda: Experiment(name=name, model=model, system=row.system, engine=row.engine, **parts),
        lambda error: blame(error, error.where or ("training" if error.key == "seq" else "")),
    )
    return Entry(experiment=experiment, launch=row.launch, expect=row.expect)


def _spelled(data: Any, place: str) -> dict[str, Any]:
    """Return a table in which `layout = "C1"` is written as `layout = { use = "C1" }`, and `network` likewise."""
    if not isinstance(data, dict):
        raise ConfigError("defaults", data, "a table", file=place)
    return {**data, **{part: {USE: data[part]} for part in _NAMED if isinstance(data.get(part), str)}}


def _levels(part: str, data: Mapping[str, Any], from_file: Shared, place: str) -> list[_Level]:
    """Return the suite tables with keys for one part of an experiment, in order of increasing precedence."""
    inherited, own = from_file.defaults.get(part, {}), data.get(part, {})
    levels = [_Level(f"defaults.{part}", inherited), _Level(part, own)]
    if part not in _NAMED:
        return levels
    tables = _NAMED[part]
    chosen = own.get(USE, inherited.get(USE))
    levels = [_Level(where, {k: v for k, v in table.items() if k != USE}) for where, table in levels]
    if chosen is None:
        return levels
    if chosen not in from_file.named[tables]:
        known = tuple(from_file.named[tables])
        right = (
            unknown_name_hint(str(chosen), known, part)
            if known
            else f"unknown {part}; the suite file has no table [{tables}]"
        )
        raise ConfigError(
            USE, chosen, says=right, file=place, where=part if USE in own else f"defaults.{part}"
        )
    named = _Level(f"{tables}.{chosen}", from_file.named[tables][str(chosen)])
    levels.insert(1 if USE in own else 0, named)
    return levels


def _blaming(make: Callable[[], T], blame: Callable[[ConfigError], ConfigError]) -> T:
    try:
        return make()
    except ConfigError as error:
        raise blame(error) from None


def _model(name: str, *, file: str, place: str) -> Model:
    from repro.config import models

    path = Path(name).expanduser()
    if models.is_file(name) and not path.is_absolute():
        path = Path(file).parent / path  # paths in a suite start at the folder of the suite file
    try:
        return models.load_model(path if models.is_file(name) else name)
    except ConfigError as error:
        raise error if error.file else error.within(file=place) from None


def _system(name: str, place: str) -> None:
    """Raise `ConfigError` unless `name` is the local machine, a packaged system or a valid system file."""
    from repro.config.systems import LOCAL_SYSTEMS, load_system_file

    if name not in LOCAL_SYSTEMS:
        try:
            load_system_file(name)
        except ConfigError as error:
            raise error if error.file else error.within(file=place) from None


def _data(training: Training, model: Model) -> None:
    """Raise `ConfigError` for training data that does not exist or does not fit the model's vocabulary and sequence."""
    if training.data in _DATA:
        if training.data == "shakespeare-gpt2" and model.vocab < 50257:
            needed = f"needs a model with GPT-2's vocabulary of 50257 ({model.name} has {model.vocab})"
            raise ConfigError("data", training.data, says=needed, where="training")
        return
    path = Path(training.data).expanduser()
    if path.suffix not in (".txt", ".bin") or not path.is_file():
        expected = f"{', '.join(_DATA)}, or the path of a .txt or .bin file that exists"
        raise ConfigError("data", training.data, expected, where="training")
    from repro.config.token_files import count_windows, open_tokens

    count_windows(open_tokens(training.data, model.vocab), training.seq or model.seq)


def _known(key: str, value: Any, cls: type[Any], *, file: str, where: str) -> None:
    known = (*cls.__dataclass_fields__, *(("world", "software") if cls is Layout else ()))
    if key not in known:
        raise ConfigError(key, value, says=unknown_name_hint(key, known), file=file, where=where)
