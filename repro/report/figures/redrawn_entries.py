"""Figures of the sources that one form fits, as data: `redrawn.toml` beside this module, read and checked.

    [[figure]]
    id = "zero-fig2"                        # file name and anchor
    title = "ZeRO, Figure 2: ..."
    text = "..."                            # what a reader should see, a sentence or two
    claims = ["zero-fig2-throughput"]       # whose conditions and source the caption gives

    [[figure.panel]]
    label = "TFLOP/s per GPU"               # of the vertical axis
    series = [{ name = "ZeRO-100B", rows = "zero-fig2-throughput/*: ZeRO per GPU" }]

A series takes its places on the axis from the rows that `rows` matches, or names them:
`at = { "8.3B" = "meg1-mp8-77pct/weak scaling" }`.  `more = { "2.5B" = 'metric(...)' }` are places at which the
source prints no number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from repro.claims.published import UNITS
from repro.config.errors import ConfigError
from repro.config.files import build, read_toml

FILE = Path(__file__).parent / "redrawn.toml"


@dataclass(kw_only=True)
class SeriesEntry:
    """One colour of a panel."""

    name: str
    rows: str = ""
    """`claim/label` with a `*`."""
    at: dict[str, str] = field(default_factory=dict)
    """`claim/label` by place."""
    more: dict[str, str] = field(default_factory=dict)
    """Expression over simulated records by place."""

    def __post_init__(self) -> None:
        if not (self.rows or self.at or self.more):
            raise ConfigError("rows", says="is missing: rows, at or more says what is drawn")
        if self.rows and "*" not in self.rows:
            raise ConfigError(
                "rows", self.rows, "claim/label with a *; at = { place = ... } takes single rows"
            )


@dataclass(kw_only=True)
class PanelEntry:
    """One pair of axes: the values, and how far ours are from the published ones."""

    label: str
    series: list[SeriesEntry]
    title: str = ""
    across: str = ""
    """What the places are, under the horizontal axis."""
    order: list[str] = field(default_factory=list)
    """Of the places, where it is not that of the rows."""
    unit: str = ""
    """Of a panel with `more`; otherwise that of the rows."""
    log: bool = False
    """Points on a logarithmic axis instead of bars."""
    under: str = ""
    """`claim/*: ...` or `claim/*`: rows whose published words stand under the places of the axis."""
    words: list[str] = field(default_factory=list)
    """Rows published as words, `claim/label`: printed above the panel with what evidence says."""

    def __post_init__(self) -> None:
        if self.unit and self.unit not in UNITS:
            raise ConfigError("unit", self.unit, f"one of {', '.join(u for u in UNITS if u)}")


@dataclass(kw_only=True)
class FigureEntry:
    """One figure of a source."""

    id: str
    title: str
    text: str
    claims: list[str]
    panel: list[PanelEntry]


@cache
def load(path: Path = FILE) -> tuple[FigureEntry, ...]:
    """The figures of `path`, in its order.  Raises `ConfigError` that names file, figure and key."""
    tables = read_toml(path)
    figures = tables.pop("figure", [])
    if tables or not isinstance(figures, list):
        raise ConfigError("figure", expected="[[figure]] tables and nothing else", file=str(path))
    found = tuple(
        build(FigureEntry, entry, file=path.name, where=str(entry.get("id", f"figure {number}")))
        for number, entry in enumerate(figures, 1)
    )
    ids = [entry.id for entry in found]
    for name in ids:
        if ids.count(name) > 1:
            raise ConfigError("id", name, "an id that is used once", file=path.name)
    return found
