"""Packaged model files and their reader.

`load_model` returns a packaged model by name, or the model of a `.toml` file. A file has `[[model]]` tables and one
`[defaults]` table, or a single model with its keys at the top level.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from functools import cache
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError
from repro.config.files import build_dataclass, read_toml
from repro.config.model import Model

FILES = Path(__file__).parent
"""Folder of the packaged model files."""
REPORT_FILES: tuple[str, ...] = ("zero", "zero-tables", "deepspeed", "turing-nlg", "megatron-2019")
REPORT_FILES += ("megatron-2020", "megatron-2021", "yuan")
"""Names of the files with models of the ZeRO, DeepSpeed, Megatron-LM and Yuan reports, in order of publication."""

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def model_names() -> list[str]:
    """Return the names of all packaged models, in the order of the files."""
    return list(_packaged())


def model_aliases() -> dict[str, str]:
    """Return a mapping from alternative names of packaged models to their names."""
    return {alias: name for name, (table, _) in _packaged().items() for alias in table.get("aliases", ())}


def model_groups() -> dict[str, list[str]]:
    """Return the names of all packaged models by file stem, with the files in `REPORT_FILES` first."""
    groups: dict[str, list[str]] = {stem: [] for stem in REPORT_FILES}
    for name, (_, path) in _packaged().items():
        groups.setdefault(path.stem, []).append(name)
    return groups


def load_model(name: str | Path) -> Model:
    """Return the packaged model `name`, the only model of `FILE.toml`, or the model NAME of `FILE.toml:NAME`.

    Raises:
        ConfigError: The name is unknown (with similar names), or the file is missing or invalid.
    """
    text = str(name)
    if is_file(text):
        return _of_file(text)
    table, path = _packaged().get(model_aliases().get(text, text), (None, FILES))
    if table is None:
        near = difflib.get_close_matches(text, [*model_names(), *model_aliases()], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`repro models` lists all models"
        raise ConfigError("model", text, says=f"no such model; {hint}")
    return _model(table, path)


def is_file(text: str) -> bool:
    """Return whether the text names a model by a file, as `FILE.toml` or `FILE.toml:NAME`."""
    return text.endswith(".toml") or ".toml:" in text or "/" in text


def _of_file(text: str) -> Model:
    head, colon, chosen = text.rpartition(".toml:")
    path = Path(f"{head}.toml" if colon else text).expanduser()
    tables = [{"name": path.stem, **table} for table in _tables(path)]
    named = {str(table["name"]): table for table in tables}
    if len(named) < max(1, len(tables)):
        raise ConfigError("model", expected="[[model]] tables with different names", file=str(path))
    if chosen not in named if colon else len(named) > 1:
        one_of = " or ".join(f"{path}:{name}" for name in named)
        raise ConfigError("model", text, says=f"must name one model of the file: {one_of}")
    return _model(named[chosen] if colon else tables[0], path)


@cache
def _packaged() -> dict[str, tuple[dict[str, Any], Path]]:
    """Return the TOML table and the file of every packaged model by name; cached for the process."""
    tables: dict[str, tuple[dict[str, Any], Path]] = {}
    for path in sorted(FILES.glob("*.toml")):
        for table in _tables(path):
            name = table.get("name", path.stem)
            if name in tables:
                raise ConfigError(
                    "name", name, f"a name that no model of {tables[name][1].name} has", file=str(path)
                )
            tables[name] = (table, path)
    return tables


def _tables(path: Path) -> list[dict[str, Any]]:
    """Return the TOML tables of all models in one file, with missing keys from the file's table `[defaults]`."""
    data = read_toml(path)
    if "model" not in data and "defaults" not in data:
        return [data]
    for key in data:
        if key not in ("model", "defaults"):
            right = "omitted: the file may contain only [defaults] and [[model]] tables"
            raise ConfigError(key, data[key], right, file=str(path))
    defaults, found = data.get("defaults", {}), data.get("model", [])
    found = [found] if isinstance(found, dict) else found
    if (
        not isinstance(defaults, dict)
        or not isinstance(found, list)
        or not all(isinstance(t, dict) for t in found)
    ):
        raise ConfigError(
            "model", expected="[[model]] tables and at most one [defaults] table", file=str(path)
        )
    return [{**defaults, **table} for table in found]


def _model(table: dict[str, Any], path: Path) -> Model:
    """Return the model of a TOML table; only invalid tables are passed to pydantic, whose import takes 0.1 s."""
    table = {key: value for key, value in table.items() if key != "aliases"}
    fields = {f.name: _TYPES[str(f.type)] for f in dataclasses.fields(Model)}
    required = {f.name for f in dataclasses.fields(Model) if f.default is dataclasses.MISSING}
    plain = all(
        key in fields
        and isinstance(value, fields[key])
        and isinstance(value, bool) == (fields[key] == (bool,))
        and (not isinstance(value, float) or math.isfinite(value))
        for key, value in table.items()
    )
    if plain and required <= table.keys():
        try:
            return Model(**table)
        except ConfigError as error:
            raise error.within(file=str(path), where=table["name"]) from None
    return build_dataclass(Model, table, file=str(path), where=str(table.get("name", "")))
