"""Packaged system files, which describe the hardware of clusters and machines, and their reader.

`load_system_file` returns the `System` of a name such as `dgx2`, or of a `.toml` file. `repro.measure.local_system`
describes the local machine; `unknowns` describes the uncertain inputs of a system.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError
from repro.config.files import build_dataclass, read_toml
from repro.config.links import check_classes
from repro.config.system import System

FILES = Path(__file__).parent
LOCAL = "local"
LOCAL_SYSTEMS = (LOCAL, "local-gpu")
"""Names by which an experiment selects the local machine as its system: processor cores, or GPUs."""
REPORT_SYSTEMS = ("dgx2", "dgx2h", "lowbw-v100", "selene", "yuan")
"""Systems on which the ZeRO, DeepSpeed, Megatron-LM and Yuan reports trained."""


def system_names() -> list[str]:
    """Return the names of all packaged systems, and `local` last, which has no file."""
    return [*sorted(path.stem for path in FILES.glob("*.toml")), LOCAL]


@cache
def system_aliases() -> dict[str, str]:
    """Return a mapping from alternative names of packaged systems to their names."""
    files = sorted(FILES.glob("*.toml"))
    return {alias: path.stem for path in files for alias in read_toml(path).get("aliases", ())}


def load_system_file(name: str | Path) -> System:
    """Return the packaged system `name`, or the system in the `.toml` file at the path `name`.

    `repro.measure.local_system.load_system` also accepts the local machine, which has no file.
    """
    assert str(name) != LOCAL, "the system `local` has no file"
    path = Path(name).expanduser()
    if path.suffix != ".toml":
        known = system_names()
        name = str(name) if str(name) in known else system_aliases().get(str(name), str(name))
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *system_aliases()], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                "system", name, says=f"{hint}known are {', '.join(known)}, and paths of .toml files"
            )
        return _load_packaged(FILES / f"{name}.toml")
    return _read(path)


@cache
def _load_packaged(path: Path) -> System:
    """Return a packaged system; cached, since every experiment of a suite reads its system."""
    return _read(path)


def _read(path: Path) -> System:
    return parse_system(read_toml(path), name=path.stem, file=str(path))


def _complete(data: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the TOML tables of a system file; missing keys come from the packaged system that its key `like` names."""
    if "like" not in data:
        return data
    known = [name for name in system_names() if name != LOCAL]
    if data["like"] not in known:
        raise ConfigError("like", data["like"], f"one of {', '.join(known)}", file=file)
    path = FILES / f"{data['like']}.toml"
    other = _complete(read_toml(path), str(path))
    links = data.get("links")
    for name, link in links.items() if isinstance(links, dict) else ():
        _check_adapters(name, link, other["links"].get(name, {}), data["like"], file)
    return _override(other, {key: value for key, value in data.items() if key != "like"})


def _check_adapters(name: str, link: Any, inherited: dict[str, Any], like: str, file: str) -> None:
    """Raise `ConfigError` if a link has another bandwidth than in system `like`, but inherits its network adapters."""
    bandwidths = [each.get("bandwidth") for each in (link, inherited) if isinstance(each, dict)]
    values = {each["value"] for each in bandwidths if isinstance(each, dict) and "value" in each}
    if len(values) == 2:
        for key in ("per", "adapters", "rings", "switch"):
            if key in inherited and key not in link:
                says = f"is missing: the bandwidth differs from {like}, so {key} must be given, too"
                raise ConfigError(key, says=says, file=file, where=f"links.{name}")


def _override(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return `table` updated with `other`, in which a number's value, range and source are replaced together."""
    found = dict(table)
    for key, value in other.items():
        mine = table.get(key)
        inner = mine if isinstance(mine, dict) and "source" not in mine else None
        found[key] = value if inner is None or not isinstance(value, dict) else _override(inner, value)
    return found


def parse_system(data: dict[str, Any], *, name: str, file: str) -> System:
    """Return the system that the TOML tables of a system file describe; `name` is the file name without `.toml`."""
    if "name" in data:
        raise ConfigError("name", data["name"], says="must be omitted; the file names its system", file=file)
    tables = {**_complete(data, file), "name": name}
    tables.pop("aliases", None)
    if isinstance(tables.get("links"), dict):  # report an unknown table [links.NAME] before its keys
        check_classes(tables["links"], file)
    return build_dataclass(System, tables, file=file)
