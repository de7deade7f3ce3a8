"""The suites that come with this package, which a command takes by name: `repro run smoke`, from any folder."""

from __future__ import annotations

from pathlib import Path

from repro.config.errors import ConfigError
from repro.suites.entry import unknown

INSTALLED = Path(__file__).parent / "files"
FOLDER = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "suites"
"""Of an installed package, or of the checkout that this is."""


def names() -> list[str]:
    """All of them, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(given: Path) -> Path:
    """The file of a suite that is given by its path, which ends in `.toml`, or by its name.  Raises `ConfigError`."""
    if given.suffix == ".toml":
        return given
    if str(given) not in names():
        right = f"{unknown(str(given), tuple(names()), 'suite')}; or the path of a .toml file"
        raise ConfigError("suite", str(given), says=right)
    return FOLDER / f"{given}.toml"
