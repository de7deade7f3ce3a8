"""The packaged system files, and their reader.

`load_system_file` returns the `System` of a name such as `dgx2`, or of a `.toml` file. `repro.measure.local_system`
describes the local machine, and `unknowns` describes the unknown numbers of a system.
"""

from __future__ import annotations

import dataclasses
import difflib
from functools import cache
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError
from repro.config.files import build_dataclass, read_toml
from repro.config.links import Collective, check_classes
from repro.config.system import Device, Link, Quantity, System
from repro.config.timing import DeviceTime, OperatorRate, Provenance

FILES = Path(__file__).parent
LOCAL = "local"
LOCAL_SYSTEMS = (LOCAL, "local-gpu")
"""Names of the local machine in an experiment: its processor cores, or its GPUs."""
REPORT_SYSTEMS = ("dgx2", "dgx2h", "lowbw-v100", "selene", "yuan")
"""Systems on which the reports trained."""


def system_names() -> list[str]:
    """Return the names of all systems; `local` is last and has no file."""
    return [*sorted(path.stem for path in FILES.glob("*.toml")), LOCAL]


@cache
def system_aliases() -> dict[str, str]:
    """Return the other names under which systems can be loaded, each with its system."""
    files = sorted(FILES.glob("*.toml"))
    return {alias: path.stem for path in files for alias in read_toml(path).get("aliases", ())}


def load_system_file(name: str | Path) -> System:
    """Return the system called `name`, or the one in the `.toml` file at the path `name`.

    The local machine has no file; `repro.measure.local_system.load_system` returns that system too.
    """
    assert str(name) != LOCAL, "the local machine has no file"
    path = Path(name).expanduser()
    if path.suffix != ".toml":
        known = system_names()
        name = str(name) if str(name) in known else system_aliases().get(str(name), str(name))
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *system_aliases()], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                "system", name, says=f"{hint}known are {', '.join(known)}, or the path of a .toml file"
            )
        return _load_packaged(FILES / f"{name}.toml")
    return _read(path)


@cache
def _load_packaged(path: Path) -> System:
    """Return a packaged system, read once, since every experiment of a suite names its system."""
    return _read(path)


def _read(path: Path) -> System:
    return parse_system(read_toml(path), name=path.stem, file=str(path))


def _complete(data: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the tables of a file, completed by those of the packaged system that it is `like`."""
    if "like" not in data:
        return data
    known = [name for name in system_names() if name != LOCAL]
    if data["like"] not in known:
        raise ConfigError("like", data["like"], f"one of {', '.join(known)}", file=file)
    path = FILES / f"{data['like']}.toml"
    other = _complete(read_toml(path), str(path))
    return _override(other, {key: value for key, value in data.items() if key != "like"})


def _override(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return `table` with the values of `other`; a number is replaced together with its range and source."""
    found = dict(table)
    for key, value in other.items():
        mine = table.get(key)
        inner = mine if isinstance(mine, dict) and "source" not in mine else None
        found[key] = value if inner is None or not isinstance(value, dict) else _override(inner, value)
    return found


def parse_system(data: dict[str, Any], *, name: str, file: str) -> System:
    """Return the system of a file's tables.  `name` is the file's name, which the file does not repeat."""
    if "name" in data:
        raise ConfigError("name", data["name"], says="no such key: a system is called as its file", file=file)
    tables = _quantities(System, dict(_complete(data, file), name=name), file, "")
    tables.pop("aliases", None)
    if "device" in tables:
        tables["device"] = _device(tables["device"], file)
    if "links" in tables:
        links = _table(tables["links"], file, "links")
        check_classes(links, file=file)
        tables["links"] = {key: _link(value, file, f"links.{key}") for key, value in links.items()}
    if "provenance" in tables:
        tables["provenance"] = build_dataclass(
            Provenance, tables["provenance"], file=file, where="provenance"
        )
    return build_dataclass(System, tables, file=file)


def _device(data: Any, file: str) -> Device:
    table = _quantities(Device, data, file, "device")
    if "peak_flops" in table:
        peaks = _table(table["peak_flops"], file, "device.peak_flops")
        table["peak_flops"] = {
            key: read_quantity(value, file=file, where=f"device.peak_flops.{key}")
            for key, value in peaks.items()
        }
    if "time" in table:
        times = _quantities(DeviceTime, table["time"], file, "device.time")
        table["time"] = build_dataclass(DeviceTime, times, file=file, where="device.time")
    if "operators" in table:
        rates = _table(table["operators"], file, "device.operators")
        table["operators"] = {
            key: build_dataclass(OperatorRate, value, file=file, where=f"device.operators.{key}")
            for key, value in rates.items()
        }
    return build_dataclass(Device, table, file=file, where="device")


def _link(data: Any, file: str, where: str) -> Link:
    table = _quantities(Link, data, file, where)
    if "collectives" in table:
        found = _table(table["collectives"], file, f"{where}.collectives")
        table["collectives"] = {
            key: build_dataclass(Collective, value, file=file, where=f"{where}.collectives.{key}")
            for key, value in found.items()
        }
    return build_dataclass(Link, table, file=file, where=where)


def _quantities(cls: type[Any], data: Any, file: str, where: str) -> dict[str, Any]:
    """Return a copy of the table `data` in which the quantities of `cls` are `Quantity`."""
    table = dict(_table(data, file, where))
    keys = [field.name for field in dataclasses.fields(cls) if field.type == Quantity.__name__]
    for key in keys:
        if key in table:
            table[key] = read_quantity(table[key], file=file, where=f"{where}.{key}".lstrip("."))
    return table


def read_quantity(data: Any, *, file: str, where: str) -> Quantity:
    """Return the quantity of `{ value = 125e12, source = "..." }`; `value = "unknown"` becomes None."""
    if not isinstance(data, dict):
        head, _, key = where.rpartition(".")
        raise ConfigError(key, data, "a table { value = ..., source = ... }", file=file, where=head)
    return build_dataclass(
        Quantity, {k: None if v == "unknown" else v for k, v in data.items()}, file=file, where=where
    )


def _table(data: Any, file: str, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(where, data, "a table", file=file)
    return data
