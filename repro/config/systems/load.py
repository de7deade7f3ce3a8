"""Read system files; every mistake in one becomes one `ConfigError` line."""

from __future__ import annotations

import dataclasses
import difflib
from functools import cache
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError
from repro.config.files import build, read_toml
from repro.config.links import Collective, check_classes
from repro.config.system import Device, Link, Quantity, System
from repro.config.timing import DeviceTime, OperatorRate, Provenance

FILES = Path(__file__).parent
LOCAL = "local"
HERE = (LOCAL, "local-gpu")
"""The machine at hand as an experiment names it: its processor cores, or its GPUs."""


def names() -> list[str]:
    """Names of all systems; `local` is last and has no file."""
    return [*sorted(path.stem for path in FILES.glob("*.toml")), LOCAL]


def load(name: str | Path) -> System:
    """Return the system called `name`, or the one in the `.toml` file at the path `name`.

    The local machine has no file; `repro.measure.local_system.load_system` returns that system too.
    """
    assert str(name) != LOCAL, "the local machine has no file"
    path = Path(name).expanduser()
    if path.suffix != ".toml":
        if str(name) not in names():
            near = difflib.get_close_matches(str(name), names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                "system", str(name), says=f"{hint}known are {', '.join(names())}, or the path of a .toml file"
            )
        return _known(FILES / f"{name}.toml")
    return _read(path)


@cache
def _known(path: Path) -> System:
    """One of ours, read once: every experiment of a suite names its system."""
    return _read(path)


def _read(path: Path) -> System:
    return parse(read_toml(path), name=path.stem, file=str(path))


def _whole(data: dict[str, Any], file: str) -> dict[str, Any]:
    """The tables of a file with what it leaves out as in the system that it is `like`: one of ours, which may be like
    another."""
    if "like" not in data:
        return data
    known = [name for name in names() if name != LOCAL]
    if data["like"] not in known:
        raise ConfigError("like", data["like"], f"one of {', '.join(known)}", file=file)
    path = FILES / f"{data['like']}.toml"
    other = _whole(read_toml(path), str(path))
    return _over(other, {key: value for key, value in data.items() if key != "like"})


def _over(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`table` with what `other` says in its place: a number is replaced with its range and its source."""
    found = dict(table)
    for key, value in other.items():
        mine = table.get(key)
        inner = mine if isinstance(mine, dict) and "source" not in mine else None
        found[key] = value if inner is None or not isinstance(value, dict) else _over(inner, value)
    return found


def parse(data: dict[str, Any], *, name: str, file: str) -> System:
    """The system in the tables of a file.  `name` is the file's name and is not repeated inside."""
    if "name" in data:
        raise ConfigError("name", data["name"], says="no such key: a system is called as its file", file=file)
    tables = _quantities(System, dict(_whole(data, file), name=name), file, "")
    if "device" in tables:
        tables["device"] = _device(tables["device"], file)
    if "links" in tables:
        links = _table(tables["links"], file, "links")
        check_classes(links, file=file)
        tables["links"] = {key: _link(value, file, f"links.{key}") for key, value in links.items()}
    if "provenance" in tables:
        tables["provenance"] = build(Provenance, tables["provenance"], file=file, where="provenance")
    return build(System, tables, file=file)


def _device(data: Any, file: str) -> Device:
    table = _quantities(Device, data, file, "device")
    if "peak_flops" in table:
        peaks = _table(table["peak_flops"], file, "device.peak_flops")
        table["peak_flops"] = {
            key: quantity(value, file=file, where=f"device.peak_flops.{key}") for key, value in peaks.items()
        }
    if "time" in table:
        times = _quantities(DeviceTime, table["time"], file, "device.time")
        table["time"] = build(DeviceTime, times, file=file, where="device.time")
    if "operators" in table:
        rates = _table(table["operators"], file, "device.operators")
        table["operators"] = {
            key: build(OperatorRate, value, file=file, where=f"device.operators.{key}")
            for key, value in rates.items()
        }
    return build(Device, table, file=file, where="device")


def _link(data: Any, file: str, where: str) -> Link:
    table = _quantities(Link, data, file, where)
    if "collectives" in table:
        found = _table(table["collectives"], file, f"{where}.collectives")
        table["collectives"] = {
            key: build(Collective, value, file=file, where=f"{where}.collectives.{key}")
            for key, value in found.items()
        }
    return build(Link, table, file=file, where=where)


def _quantities(cls: type[Any], data: Any, file: str, where: str) -> dict[str, Any]:
    """A copy of the table `data` in which the fields of `cls` that are quantities have become ones."""
    table = dict(_table(data, file, where))
    keys = [field.name for field in dataclasses.fields(cls) if field.type == Quantity.__name__]
    for key in keys:
        if key in table:
            table[key] = quantity(table[key], file=file, where=f"{where}.{key}".lstrip("."))
    return table


def quantity(data: Any, *, file: str, where: str) -> Quantity:
    """`{ value = 125e12, source = "..." }`; `value = "unknown"` becomes None."""
    if not isinstance(data, dict):
        head, _, key = where.rpartition(".")
        raise ConfigError(key, data, "a table { value = ..., source = ... }", file=file, where=head)
    return build(
        Quantity, {k: None if v == "unknown" else v for k, v in data.items()}, file=file, where=where
    )


def _table(data: Any, file: str, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(where, data, "a table", file=file)
    return data
