"""The suites and SLURM profiles that come with this package, taken by name from any folder: `repro run smoke`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from repro.config.errors import ConfigError
from repro.config.suites.entry import unknown

CHECKOUT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Packaged:
    """TOML files of one kind."""

    key: str
    """What names one on the command line."""
    what: str
    folder: Path

    def files(self) -> list[Path]:
        """All of them, sorted."""
        return sorted(self.folder.glob("*.toml"))

    def names(self) -> list[str]:
        """Of `files`, as a person writes them."""
        return [path.stem for path in self.files()]

    def find(self, given: Path) -> Path:
        """The file that is given by its path, which ends in `.toml`, or by its name.  Raises `ConfigError`."""
        if given.suffix == ".toml":
            return given
        if str(given) not in self.names():
            here = Path(f"{given}.toml")
            right = f"{unknown(str(given), tuple(self.names()), self.what)}; or the path of a .toml file"
            raise ConfigError(self.key, str(given), says=f"did you mean {here}?" if here.is_file() else right)
        return self.folder / f"{given}.toml"


def _packaged(key: str, what: str, installed: str, of_a_checkout: str) -> Packaged:
    folder = Path(__file__).parent / installed
    return Packaged(key, what, folder if folder.is_dir() else CHECKOUT / of_a_checkout)


SUITES = _packaged("suite", "suite", "files", "suites")
PROFILES = _packaged("--profile", "profile", "profiles", "slurm")
