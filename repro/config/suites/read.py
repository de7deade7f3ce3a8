"""Read a suite: a TOML file that names experiments, what they share, and which of them are compared.

Everything that can be wrong in it is found here, before any process starts, and becomes one
`ConfigError` line that names file, experiment, key, value and what would be right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.config import ConfigError, Experiment
from repro.config.files import build, read_toml
from repro.config.sizes import check_name
from repro.config.suites.entry import Entry, read_entry, shared, unknown
from repro.config.suites.packaged import SUITES


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Experiments that run interleaved in one launch, each subject against the baseline."""

    baseline: str
    subjects: tuple[str, ...]
    rounds: int = 5
    apart: bool = False
    """Each turn builds its experiment anew and frees it: of sizes of which two do not fit a device together."""


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
        """The entry of the experiment called `name`."""
        return next(entry for entry in self.entries if entry.experiment.name == name)


@dataclass(frozen=True, kw_only=True)
class _Head:
    name: str
    description: str = ""
    claims: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Compare:
    baseline: str
    subjects: list[str]
    rounds: int = 5
    apart: bool = False


def load(given: Path) -> Suite:
    """The suite in a `.toml` file, or the packaged one of this name.  Raises `ConfigError`."""
    path = SUITES.find(given)
    return parse(read_toml(path), file=str(path))


def parse(data: dict[str, Any], *, file: str) -> Suite:
    """The suite in the tables of a file."""
    tables = ("suite", "defaults", "models", "layouts", "networks", "experiment", "compare")
    for key in data:
        if key not in tables:
            raise ConfigError(key, says=unknown(key, tables), file=file)
    if "suite" not in data:
        raise ConfigError("suite", says="is missing: a table [suite] with a name", file=file)
    head = build(_Head, data["suite"], file=file, where="suite")
    try:
        check_name("name", head.name)
    except ConfigError as error:
        raise error.within(file=file, where="suite") from None
    from_file = shared(data, file)
    rows = _tables(data, "experiment", file)
    if not rows:
        raise ConfigError("experiment", says="is missing: at least one [[experiment]] table", file=file)
    entries = [read_entry(row, from_file, number) for number, row in enumerate(rows, 1)]
    _distinct(entries, file)
    _continued(entries, file)
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
            raise ConfigError(f'experiment "{name}"', says=right, file=file)
        names.add(name)
        keys[key] = name


def _continued(entries: list[Entry], file: str) -> None:
    """Who continues another experiment trains the same, and longer."""
    known = {entry.experiment.name: entry.experiment for entry in entries}
    for experiment in known.values():
        name = experiment.training.continues
        if not name:
            continue
        place = f'{file}: experiment "{experiment.name}"'
        where = "training"
        if name not in known or name == experiment.name:
            right = unknown(name, tuple(other for other in known if other != experiment.name), "experiment")
            raise ConfigError("continues", name, says=right, file=place, where=where)
        first = known[name]
        if not first.training.checkpoint_every:
            right = "an experiment with checkpoint_every of 1 or more"
            raise ConfigError("continues", name, right, file=place, where=where)
        if first.training.steps >= experiment.training.steps:
            right = f'more than the {first.training.steps} steps of "{name}", which it continues'
            raise ConfigError("steps", experiment.training.steps, right, file=place, where=where)
        for part, value in first.course.items():
            if experiment.course[part] != value:
                differs = (
                    f"an experiment of the same training; {_differing(part, value, experiment.course[part])}"
                )
                raise ConfigError("continues", name, differs, file=place, where=where)


def _differing(part: str, there: Any, here: Any) -> str:
    """The first thing that differs between two courses."""
    if isinstance(there, dict) and isinstance(here, dict):
        key = next(key for key in sorted({*there, *here}) if there.get(key) != here.get(key))
        there, here = (repr(side[key]) if key in side else "its default" for side in (there, here))
        return f"{part}.{key} is {there} there and {here} here"
    return f"{part} is {there!r} there and {here!r} here"


def _comparison(data: Any, entries: list[Entry], file: str) -> Comparison:
    row = build(_Compare, data, file=file, where="compare")
    known = {entry.experiment.name: entry.experiment for entry in entries}
    names = [row.baseline, *row.subjects]
    for key, name in [("baseline", row.baseline), *(("subjects", subject) for subject in row.subjects)]:
        if name not in known:
            raise ConfigError(
                key, name, says=unknown(name, tuple(known), "experiment"), file=file, where="compare"
            )
        if names.count(name) > 1:
            raise ConfigError(key, name, says="names an experiment twice", file=file, where="compare")
    if not row.subjects:
        raise ConfigError("subjects", row.subjects, "at least one experiment", file=file, where="compare")
    if row.rounds < 1:
        raise ConfigError("rounds", row.rounds, "1 or more", file=file, where="compare")
    for name in names:
        every = known[name].training.checkpoint_every
        if every:
            right = "0 in [[compare]]: what is written between steps, and after a stop, cannot be compared"
            place = f'{file}: experiment "{name}"'
            raise ConfigError("checkpoint_every", every, right, file=place, where="training")
    _alike([known[name] for name in names], file, f'compare with baseline "{row.baseline}"')
    for name in names:
        training = known[name].training
        if training.steps - training.untimed_steps < row.rounds:
            right = f"at most the timed steps of {name}: {training.steps - training.untimed_steps}"
            raise ConfigError("rounds", row.rounds, right, file=file, where="compare")
    return Comparison(baseline=row.baseline, subjects=tuple(row.subjects), rounds=row.rounds, apart=row.apart)


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
    """Experiments of one launch have one world, one system, one network and one memory limit."""
    first = members[0]
    for other in members[1:]:
        for key, mine, theirs in (
            ("layout.world", other.layout.world, first.layout.world),
            ("system", other.system, first.system),
            ("network", _network(other), _network(first)),
            ("limits.memory_bytes", other.limits.memory_bytes, first.limits.memory_bytes),
        ):
            if mine != theirs:
                place = f'{file}: {what}: experiment "{other.name}"'
                raise ConfigError(
                    key, mine, f'{theirs!r} as in "{first.name}": they share one launch', file=place
                )


def _network(experiment: Experiment) -> str:
    return str(experiment.network) if experiment.network is not None else "none"


def _tables(data: dict[str, Any], key: str, file: str) -> list[Any]:
    tables = data.get(key, [])
    if not isinstance(tables, list):
        raise ConfigError(key, expected=f"[[{key}]] tables, in double brackets", file=file)
    return tables
