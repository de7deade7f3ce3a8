"""Suite files: TOML files with experiments, their shared settings and their comparisons.

`load_suite(Path("suites/smoke.toml"))` returns a checked, frozen `Suite`; `load_suite(Path("smoke"))` a packaged one.
Every mistake in a file raises a `ConfigError` of one line before any process starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.config import Experiment
from repro.config.errors import ConfigError, require, unknown_name_hint
from repro.config.files import build_dataclass, check_writable, read_toml
from repro.config.sizes import check_name
from repro.config.suites.entry import Entry, read_entry, shared
from repro.util.files import replace_file

__all__ = [
    "PROFILES",
    "SUITES",
    "Comparison",
    "Entry",
    "Suite",
    "load_suite",
    "parse_suite",
    "write_template",
]

CHECKOUT = Path(__file__).parents[3]
TEMPLATES = {
    kind: Path(__file__).with_name(f"template-{kind}.toml") for kind in ("suite", "claim", "system", "model")
}


@dataclass(frozen=True)
class PackagedFiles:
    """Packaged TOML files of one kind (suites or SLURM profiles), which commands find by name."""

    key: str
    """Argument or option of a command that takes the name of a packaged suite or SLURM profile, for error messages."""
    what: str
    folder: Path

    def files(self) -> list[Path]:
        """Return the paths of all packaged suite files or all packaged SLURM profiles, sorted."""
        return sorted(self.folder.glob("*.toml"))

    def names(self) -> list[str]:
        """Return the names of all packaged suite files or all packaged SLURM profiles, without `.toml`."""
        return [path.stem for path in self.files()]

    def find(self, given: Path) -> Path:
        """Return the path of the packaged suite or profile `given`, or a `.toml` path; else raise `ConfigError`."""
        if given.suffix == ".toml":
            return given
        if str(given) not in self.names():
            here = Path(f"{given}.toml")
            right = f"{unknown_name_hint(str(given), tuple(self.names()), self.what)}; or the path of a .toml file"
            raise ConfigError(self.key, str(given), says=f"did you mean {here}?" if here.is_file() else right)
        return self.folder / f"{given}.toml"


def _packaged(key: str, what: str, installed: str, of_a_checkout: str) -> PackagedFiles:
    folder = Path(__file__).parent / installed
    return PackagedFiles(key, what, folder if folder.is_dir() else CHECKOUT / of_a_checkout)


SUITES = _packaged("suite", "suite", "files", "suites")
PROFILES = _packaged("--profile", "profile", "profiles", "slurm")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of the throughputs of experiments with that of a baseline; one launch interleaves the experiments."""

    baseline: str
    """Name of the experiment with which the other experiments of the comparison are compared."""
    subjects: tuple[str, ...]
    """Names of the experiments that are compared with the baseline."""
    rounds: int = 5
    """Number of rounds; in each round, every experiment of the comparison runs once."""
    apart: bool = False
    """Whether each experiment is built and freed in every round, because all together exceed the device's memory."""

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", self.rounds, "1 or more")
        twice = "must name each experiment once"
        require(self.baseline not in self.subjects, "baseline", self.baseline, says=twice)
        for name in self.subjects:
            require(self.subjects.count(name) == 1, "subjects", name, says=twice)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Content of a suite file after all checks: experiments and comparisons."""

    name: str
    file: str
    description: str = ""
    claims: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    def entry(self, name: str) -> Entry:
        """Return the suite's experiment called `name`, with its launch and its expected outcome."""
        return next(entry for entry in self.entries if entry.experiment.name == name)


@dataclass(frozen=True, kw_only=True)
class _Head:
    name: str
    description: str = ""
    claims: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("name", self.name)


def load_suite(given: Path) -> Suite:
    """Return the suite in a `.toml` file, or the packaged suite of this name; raise `ConfigError` if it is invalid."""
    path = SUITES.find(given)
    return parse_suite(read_toml(path), file=str(path))


def parse_suite(data: dict[str, Any], *, file: str) -> Suite:
    """Return the checked suite that the TOML tables of a suite file describe."""
    tables = ("suite", "defaults", "models", "layouts", "networks", "experiment", "compare")
    for key in data:
        if key not in tables:
            raise ConfigError(key, says=unknown_name_hint(key, tables), file=file)
    require("suite" in data, "suite", says="is missing: add a table [suite] with a name", file=file)
    head = build_dataclass(_Head, data["suite"], file=file, where="suite")
    from_file = shared(data, file)
    rows = _tables(data, "experiment", file)
    require(rows, "experiment", says="is missing: add at least one [[experiment]] table", file=file)
    entries = [read_entry(row, from_file, number) for number, row in enumerate(rows, 1)]
    _distinct(entries, file)
    _continued(entries, file)
    comparisons = tuple(_comparison(row, entries, file) for row in _tables(data, "compare", file))
    _launches(entries, comparisons, file)
    return Suite(**vars(head), file=file, entries=tuple(entries), comparisons=comparisons)


def _distinct(entries: list[Entry], file: str) -> None:
    """Raise `ConfigError` unless the experiments of a suite have different names and different settings."""
    names: set[str] = set()
    keys: dict[str, str] = {}
    for entry in entries:
        name, key = entry.experiment.name, entry.experiment.key
        require(name not in names, "name", name, "a name that no other experiment has", file=file)
        if key in keys:
            right = f'has the same conditions as "{keys[key]}"; remove one of the two experiments'
            raise ConfigError(f'experiment "{name}"', says=right, file=file)
        names.add(name)
        keys[key] = name


def _continued(entries: list[Entry], file: str) -> None:
    """Raise `ConfigError` unless an experiment that continues another has the same training settings and more steps."""
    known = {entry.experiment.name: entry.experiment for entry in entries}
    for experiment in known.values():
        name = experiment.training.continues
        if not name:
            continue
        place = f'{file}: experiment "{experiment.name}"'
        where = "training"
        if name not in known or name == experiment.name:
            right = unknown_name_hint(
                name, tuple(other for other in known if other != experiment.name), "experiment"
            )
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
                difference = _differing(part, value, experiment.course[part])
                differs = f"an experiment with equal model and training settings; {difference}"
                raise ConfigError("continues", name, differs, file=place, where=where)


def _differing(part: str, there: Any, here: Any) -> str:
    """Return a text that names the first setting of `part` (model, training, ...) in which two experiments differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        key = next(key for key in sorted({*there, *here}) if there.get(key) != here.get(key))
        there, here = (repr(side[key]) if key in side else "its default" for side in (there, here))
        return f"the named experiment has {part}.{key} = {there}, and this experiment has {here}"
    return f"the named experiment has {part} = {there!r}, and this experiment has {here!r}"


def _comparison(data: Any, entries: list[Entry], file: str) -> Comparison:
    row = build_dataclass(Comparison, data, file=file, where="compare")
    known = {entry.experiment.name: entry.experiment for entry in entries}
    names = [row.baseline, *row.subjects]
    for key, name in [("baseline", row.baseline), *(("subjects", subject) for subject in row.subjects)]:
        if name not in known:
            raise ConfigError(
                key,
                name,
                says=unknown_name_hint(name, tuple(known), "experiment"),
                file=file,
                where="compare",
            )
    require(row.subjects, "subjects", [], "at least one experiment", file=file, where="compare")
    for name in names:
        every = known[name].training.checkpoint_every
        if every:
            right = "0 for experiments of [[compare]], since writing checkpoints would change the step times"
            place = f'{file}: experiment "{name}"'
            raise ConfigError("checkpoint_every", every, right, file=place, where="training")
    _alike([known[name] for name in names], file, f'compare with baseline "{row.baseline}"')
    for name in names:
        training = known[name].training
        if training.steps - training.untimed_steps < row.rounds:
            right = f"at most the number of timed steps of {name}: {training.steps - training.untimed_steps}"
            raise ConfigError("rounds", row.rounds, right, file=file, where="compare")
    return row


def _launches(entries: list[Entry], comparisons: tuple[Comparison, ...], file: str) -> None:
    compared = {name for row in comparisons for name in (row.baseline, *row.subjects)}
    groups: dict[str, list[Experiment]] = {}
    for entry in entries:
        if entry.launch:
            if entry.experiment.name in compared:
                place = f'{file}: experiment "{entry.experiment.name}"'
                right = "omitted, because the experiments of a [[compare]] share one launch"
                raise ConfigError("launch", entry.launch, right, file=place)
            groups.setdefault(entry.launch, []).append(entry.experiment)
    for launch, members in groups.items():
        _alike(members, file, f'launch "{launch}"')


def _alike(members: list[Experiment], file: str, what: str) -> None:
    """Raise `ConfigError` unless the experiments of one launch agree in ranks, system, network and memory limit."""
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
                    key, mine, f'{theirs!r}, as in experiment "{first.name}" (same processes)', file=place
                )


def _network(experiment: Experiment) -> str:
    return str(experiment.network) if experiment.network is not None else "none"


def _tables(data: dict[str, Any], key: str, file: str) -> list[Any]:
    tables = data.get(key, [])
    if not isinstance(tables, list):
        raise ConfigError(key, expected=f"[[{key}]] tables, in double brackets", file=file)
    return tables


def write_template(path: Path, kind: str = "suite") -> None:
    """Write a commented template file of a kind (suite, claim, system or model) to the new file `path`."""
    require(kind in TEMPLATES, "KIND", kind, f"one of {', '.join(TEMPLATES)}")
    require(path.suffix == ".toml", "FILE", str(path), "a file that ends in .toml")
    require(not path.exists(), "FILE", str(path), says="already exists; choose another name")
    check_name("FILE", path.stem)
    check_writable("FILE", path)
    text = TEMPLATES[kind].read_text(encoding="utf-8").replace("FILE", str(path))
    replace_file(path, text.replace('"NAME"', json.dumps(path.stem)))
