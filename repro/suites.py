"""Read a suite: a TOML file that names experiments, what they share, and which of them are compared.

Everything that can be wrong in it is found here, before any process starts, and becomes one
``ConfigError`` line that names file, experiment, key, value and what would be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from repro.config import ConfigError, Experiment, Layout, Limits, Model, Training
from repro.config.files import build, read_toml

T = TypeVar("T")
OUTCOMES = ("ok", "oom", "diverged", "timeout", "hang", "error")
_PARTS = {"layout": Layout, "training": Training, "limits": Limits}
_DATA = ("synthetic", "shakespeare", "shakespeare-gpt2")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One experiment of a suite."""

    experiment: Experiment
    launch: str = ""
    """Experiments with the same name here share one start of the processes."""
    expect: str = "ok"
    """The outcome that is a success: ``oom`` where out-of-memory is the claim."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Experiments that run interleaved in one launch, each subject against the baseline."""

    baseline: str
    subjects: tuple[str, ...]
    rounds: int = 5


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite file, checked."""

    name: str
    file: str
    description: str = ""
    claims: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    comparisons: tuple[Comparison, ...] = field(default=())

    def entry(self, name: str) -> Entry:
        """The entry of the experiment called ``name``."""
        return next(entry for entry in self.entries if entry.experiment.name == name)


@dataclass(frozen=True, kw_only=True)
class _Head:
    name: str
    description: str = ""
    claims: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One ``[[experiment]]`` table (or ``[defaults]``) as it is written."""

    name: str = ""
    model: str = ""
    engine: str = "native"
    system: str = "local"
    launch: str = ""
    expect: str = "ok"
    layout: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Compare:
    baseline: str
    subjects: list[str]
    rounds: int = 5


def load(path: Path) -> Suite:
    """The suite in ``path``.  Raises ``ConfigError``."""
    return parse(read_toml(path), file=str(path))


def parse(data: dict[str, Any], *, file: str) -> Suite:
    """The suite in the tables of a file."""
    tables = ("suite", "defaults", "experiment", "compare")
    for key in data:
        if key not in tables:
            raise ConfigError(key, expected=_unknown(key, tables), file=file)
    if "suite" not in data:
        raise ConfigError("suite", expected="is missing: a table [suite] with a name", file=file)
    head = build(_Head, data["suite"], file=file, where="suite")
    defaults = _defaults(data.get("defaults", {}), file)
    rows = _tables(data, "experiment", file)
    if not rows:
        raise ConfigError("experiment", expected="is missing: at least one [[experiment]] table", file=file)
    entries = [_entry(row, defaults, file=file, number=number) for number, row in enumerate(rows, 1)]
    _distinct(entries, file)
    comparisons = tuple(_comparison(row, entries, file) for row in _tables(data, "compare", file))
    _launches(entries, comparisons, file)
    return Suite(
        name=head.name,
        file=file,
        description=head.description,
        claims=tuple(head.claims),
        entries=tuple(entries),
        comparisons=comparisons,
    )


def _defaults(data: Any, file: str) -> dict[str, Any]:
    build(_Row, data, file=file, where="defaults")
    if "name" in data:
        raise ConfigError(
            "name", data["name"], "a name for each experiment, not for all", file=file, where="defaults"
        )
    for part, cls in _PARTS.items():
        # Values are checked in the experiments that they reach; keys can be checked here.
        for key in data.get(part, {}):
            _known(key, data[part][key], cls, file=file, where=f"defaults.{part}")
    return dict(data)


def _entry(data: Any, defaults: dict[str, Any], *, file: str, number: int) -> Entry:
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("name", expected=f"is missing in [[experiment]] number {number}", file=file)
    place = f'{file}: experiment "{name}"'
    for section in _PARTS:
        if not isinstance(data.get(section, {}), dict):
            raise ConfigError(section, data[section], "a table", file=place)
    row = build(_Row, {**defaults, **{k: v for k, v in data.items() if k not in _PARTS}}, file=place)
    if not row.model:
        raise ConfigError("model", expected="is missing: the name of a model, see `repro models`", file=place)
    if row.expect not in OUTCOMES:
        raise ConfigError("expect", row.expect, f"one of {', '.join(OUTCOMES)}", file=place)

    def blame(error: ConfigError, part: str) -> ConfigError:
        """Say [defaults] where the value comes from there."""
        inherited = error.key not in data.get(part, {}) and error.key in defaults.get(part, {})
        where = error.where or part
        where = f"defaults.{where}" if inherited else where
        return ConfigError(error.key, error.value, error.expected, file=place, where=where)

    def part(key: str, cls: type[T]) -> T:
        table = {**defaults.get(key, {}), **data.get(key, {})}
        world = table.pop("world", None) if key == "layout" else None
        built = _blaming(lambda: build(cls, table, where=key), lambda error: blame(error, key))
        if world is not None and isinstance(built, Layout) and world != built.world:
            right = f"tp x dp = {built.tp} x {built.dp} = {built.world}"
            raise blame(ConfigError("world", world, right, where=key), key)
        return built

    model = _model(row.model, file=file, place=place)
    layout, training, limits = part("layout", Layout), part("training", Training), part("limits", Limits)
    _blaming(lambda: _data(training, model), lambda error: blame(error, "training"))
    experiment = _blaming(
        lambda: Experiment(
            name=name,
            model=model,
            layout=layout,
            training=training,
            system=row.system,
            engine=row.engine,
            limits=limits,
        ),
        lambda error: blame(error, error.where or ("training" if error.key == "seq" else "")),
    )
    return Entry(experiment=experiment, launch=row.launch, expect=row.expect)


def _blaming(make: Callable[[], T], blame: Callable[[ConfigError], ConfigError]) -> T:
    try:
        return make()
    except ConfigError as error:
        raise blame(error) from None


def _model(name: str, *, file: str, place: str) -> Model:
    from repro import models

    path = Path(name).expanduser()
    if name.endswith(".toml") and not path.is_absolute():
        path = Path(file).parent / path  # as the suite's author sees it
    try:
        return models.load(str(path) if name.endswith(".toml") else name)
    except ConfigError as error:
        raise error if error.file else error.within(file=place) from None


def _data(training: Training, model: Model) -> None:
    """Find out here what a rank would only find out when it opens its data."""
    if training.data in _DATA:
        if training.data == "shakespeare-gpt2" and model.vocab < 50257:
            expected = f"a model with GPT-2's vocabulary of 50257 ({model.name} has {model.vocab})"
            raise ConfigError("data", training.data, expected, where="training")
        return
    path = Path(training.data).expanduser()
    if path.suffix not in (".txt", ".bin") or not path.is_file():
        expected = f"{', '.join(_DATA)}, or the path of a .txt or .bin file that exists"
        raise ConfigError("data", training.data, expected, where="training")


def _distinct(entries: list[Entry], file: str) -> None:
    """Every experiment has a name and conditions that no other has."""
    names: set[str] = set()
    keys: dict[str, str] = {}
    for entry in entries:
        name, key = entry.experiment.name, entry.experiment.key
        if name in names:
            raise ConfigError("name", name, "a name that no other experiment has", file=file)
        if key in keys:
            right = f'has the same conditions as "{keys[key]}"; leave one of them out'
            raise ConfigError(f'experiment "{name}"', expected=right, file=file)
        names.add(name)
        keys[key] = name


def _comparison(data: Any, entries: list[Entry], file: str) -> Comparison:
    row = build(_Compare, data, file=file, where="compare")
    known = {entry.experiment.name: entry.experiment for entry in entries}
    names = [row.baseline, *row.subjects]
    for key, name in [("baseline", row.baseline), *(("subjects", subject) for subject in row.subjects)]:
        if name not in known:
            raise ConfigError(
                key, name, _unknown(name, tuple(known), "experiment"), file=file, where="compare"
            )
        if names.count(name) > 1:
            raise ConfigError(key, name, "each experiment once", file=file, where="compare")
    if not row.subjects:
        raise ConfigError("subjects", row.subjects, "at least one experiment", file=file, where="compare")
    if row.rounds < 1:
        raise ConfigError("rounds", row.rounds, "1 or more", file=file, where="compare")
    _alike([known[name] for name in names], file, f'compare with baseline "{row.baseline}"')
    return Comparison(baseline=row.baseline, subjects=tuple(row.subjects), rounds=row.rounds)


def _launches(entries: list[Entry], comparisons: tuple[Comparison, ...], file: str) -> None:
    compared = {name for row in comparisons for name in (row.baseline, *row.subjects)}
    groups: dict[str, list[Experiment]] = {}
    for entry in entries:
        if entry.launch:
            if entry.experiment.name in compared:
                place = f'{file}: experiment "{entry.experiment.name}"'
                raise ConfigError(
                    "launch", entry.launch, "left out: [[compare]] already shares a launch", file=place
                )
            groups.setdefault(entry.launch, []).append(entry.experiment)
    for launch, members in groups.items():
        _alike(members, file, f'launch "{launch}"')


def _alike(members: list[Experiment], file: str, what: str) -> None:
    """Experiments of one launch have one world, one system and one memory limit."""
    first = members[0]
    for other in members[1:]:
        for key, mine, theirs in (
            ("layout.world", other.layout.world, first.layout.world),
            ("system", other.system, first.system),
            ("limits.memory_bytes", other.limits.memory_bytes, first.limits.memory_bytes),
        ):
            if mine != theirs:
                place = f'{file}: {what}: experiment "{other.name}"'
                raise ConfigError(
                    key, mine, f'{theirs!r} as in "{first.name}": they share one launch', file=place
                )


def _tables(data: dict[str, Any], key: str, file: str) -> list[Any]:
    tables = data.get(key, [])
    if not isinstance(tables, list):
        raise ConfigError(key, expected=f"[[{key}]] tables, in double brackets", file=file)
    return tables


def _known(key: str, value: Any, cls: type[Any], *, file: str, where: str) -> None:
    known = (*cls.__dataclass_fields__, *(("world",) if cls is Layout else ()))
    if key not in known:
        raise ConfigError(key, value, _unknown(key, known), file=file, where=where)


def _unknown(key: str, known: tuple[str, ...], what: str = "key") -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"unknown {what}; {hint}"
