"""Published figures, redrawn as `redrawn.toml` specifies: published values, our values, and their relative errors.

    [[figure]]
    id = "zero-fig2"                        # file name and anchor
    title = "ZeRO, Figure 2: ..."
    text = "..."                            # a sentence or two on the message of the figure
    claims = ["zero-fig2-throughput"]       # claims whose ids the caption lists

    [[figure.panel]]
    label = "TFLOP/s per GPU"               # of the vertical axis
    series = [{ name = "ZeRO-100B", rows = "zero-fig2-throughput/*: ZeRO per GPU" }]

The labels of a data series on the horizontal axis come from the published values that `rows` matches, or `at`:
`at = { "8.3B" = "meg1-mp8-77pct/weak scaling" }`. Labels in `more = { "2.5B" = 'metric(...)' }` have no printed number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from repro.claims.published import UNITS
from repro.claims.tolerance import RELATIVE_TOLERANCE
from repro.config.errors import ConfigError, require
from repro.config.files import build_dataclass, read_toml
from repro.report.figures import style
from repro.report.figures.style import Drawing
from repro.report.figures.values import BarPair, Value, View, bar_pair, draw_bars, draw_error, draw_legend
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import count_bases

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ENTRIES_FILE = Path(__file__).parent / "redrawn.toml"


@dataclass(kw_only=True)
class SeriesEntry:
    """Entry of `redrawn.toml` for one data series of a panel, whose bars have one colour."""

    name: str
    rows: str = ""
    """Pattern `claim/label` of the published values to draw; the text that `*` matches is a bar's label on the axis."""
    at: dict[str, str] = field(default_factory=dict)
    """Published value of each bar, as `claim/label`, by the bar's label on the horizontal axis."""
    more: dict[str, str] = field(default_factory=dict)
    """Formula over simulated records for each bar without a published number, by the bar's label on the axis."""

    def __post_init__(self) -> None:
        wrong = "is missing; a data series must have one of the keys rows, at, more"
        require(self.rows or self.at or self.more, "rows", says=wrong)
        if self.rows and "*" not in self.rows:
            right = "CLAIM/LABEL with a * for the axis label; a value without * belongs in at = { AXIS-LABEL = ... }"
            raise ConfigError("rows", self.rows, right)


@dataclass(kw_only=True)
class PanelEntry:
    """Entry of `redrawn.toml` for a panel: values in the upper axes, and errors of our values in the lower axes."""

    label: str
    series: list[SeriesEntry]
    title: str = ""
    across: str = ""
    """Label of the panel's horizontal axis."""
    order: list[str] = field(default_factory=list)
    """Labels that come first on the horizontal axis, in this order; others follow in the order of the claim's file."""
    unit: str = ""
    """Unit of a panel's values, needed for bars without published numbers; empty: that of the first value."""
    under: str = ""
    """Pattern `claim/label` with a `*`, of the published values whose original text is printed below the axis."""
    words: list[str] = field(default_factory=list)
    """Published values, as `claim/label`, whose original text and verdict are printed above the panel."""

    def __post_init__(self) -> None:
        if self.unit and self.unit not in UNITS:
            raise ConfigError("unit", self.unit, f"one of {', '.join(u for u in UNITS if u)}")


@dataclass(kw_only=True)
class FigureEntry:
    """Entry of `redrawn.toml` for one figure of a published report."""

    id: str
    title: str
    text: str
    claims: list[str]
    panel: list[PanelEntry]


@cache
def load_entries(path: Path = ENTRIES_FILE) -> tuple[FigureEntry, ...]:
    """Return the entries of redrawn figures in the TOML file `path`. Raises `ConfigError` for an invalid entry."""
    tables = read_toml(path)
    figures = tables.pop("figure", [])
    if tables or not isinstance(figures, list):
        raise ConfigError("figure", expected="[[figure]] tables, the only key of the file", file=str(path))
    found = tuple(
        build_dataclass(FigureEntry, entry, file=path.name, where=str(entry.get("id", f"figure {number}")))
        for number, entry in enumerate(figures, 1)
    )
    ids = [entry.id for entry in found]
    for name in ids:
        require(ids.count(name) <= 1, "id", name, "an id that no other figure has", file=path.name)
    return found


SERIES_COLOURS = (style.BLUE, style.ORANGE, style.GREEN)
"""Colours of the first, second and third data series of a redrawn figure."""
MAX_ROW_BARS = 40
"""Maximum number of bars in one row of panels of a redrawn figure."""
_INDEXED_NAME = re.compile(r"\b([A-Z])_(\w+(?:\+\w+)?)")
"""Pattern of names with a subscript in published texts, such as `P_os`, `P_a+cpu` and `C_B`."""
MAX_DRAWN_ERROR = 1.0
"""Maximum drawn relative error (1.0 is 100 %); larger errors are drawn at this limit and labelled with their value."""


@dataclass(frozen=True)
class Panel:
    """Panel of a redrawn figure: its entry in `redrawn.toml` and the values of its data series."""

    entry: PanelEntry
    series: tuple[tuple[str, tuple[Value, ...]], ...]
    """Name and values of each data series of the panel."""
    places: tuple[str, ...]
    unit: str

    @property
    def bars(self) -> int:
        """Width of the panel of a figure, as a number of bars."""
        return max(4, 2 * len(self.places) * self.crowd)

    def slot(self, value: Value, series: str) -> BarPair:
        """Return the axis position of a value's bars, next to bars of other data series with the same axis label."""
        there = [name for name, values in self.series if any(other.at == value.at for other in values)]
        first = (self.crowd - len(there)) / 2
        return bar_pair(self.places.index(value.at), first + there.index(series), self.crowd)

    @property
    def crowd(self) -> int:
        """Maximum number of data series of the panel that have a value at one label of the horizontal axis."""
        return max(sum(value.at == place for value in self.values) for place in self.places)

    @property
    def compared(self) -> bool:
        """Whether the published report prints a number for any value in the panel of the redrawn figure."""
        return any(value.published for value in self.values)

    @property
    def values(self) -> list[Value]:
        """Values of all data series in one panel of the figure."""
        return [value for _, values in self.series for value in values]


def draw_entry(entry: FigureEntry, view: View) -> Drawing:
    """Draw a published figure again, with our values; omit the picture if the results store has no such values."""
    panels = [_read_panel(panel, view) for panel in entry.panel]
    values = [value for panel in panels for value in panel.values]
    remedy = tuple(dict.fromkeys(command for value in values for command in value.remedy))
    shown = {run: ours.kind for value in values for ours in value.ours for run in ours.runs}
    words = (
        f"{entry.text} The results folder has no results for the published values: {_claims_sentence(entry)}"
    )
    empty = Drawing(entry.id, entry.title, words, missing=" && ".join(remedy), evidence=SIMULATED)
    if not shown:
        return empty
    evidence = "measured" if "measured" in shown.values() else SIMULATED
    names = dict.fromkeys(name for panel in panels for name, _ in panel.series)
    colours = {name: SERIES_COLOURS[number % len(SERIES_COLOURS)] for number, name in enumerate(names)}

    figure, grid = _make_axes(panels)
    for panel, (upper, lower) in zip(panels, grid, strict=True):
        _draw_values(upper, panel, colours, view)
        if lower is not None:
            _draw_errors(lower, panel, colours, view)
    figure.align_ylabels()
    draw_legend(figure, colours, values)
    runs = sorted(run for run, kind in shown.items() if kind == evidence)
    drawn = empty.drawn(figure, _caption(entry, values), runs, missing=empty.missing)
    return replace(drawn, evidence=evidence)


def _read_panel(entry: PanelEntry, view: View) -> Panel:
    series = tuple((one.name, tuple(_read_series(one, entry, view))) for one in entry.series)
    values = [value for _, found in series for value in found]
    places = list(dict.fromkeys(value.at for value in values))
    if entry.order:
        places = [*entry.order, *(place for place in places if place not in entry.order)]
    return Panel(entry, series, tuple(places), entry.unit or values[0].unit)


def _read_series(entry: SeriesEntry, panel: PanelEntry, view: View) -> list[Value]:
    found = view.matching(entry.rows) if entry.rows else []
    found += [view.value(place, reference) for place, reference in entry.at.items()]
    return found + [view.unpublished(place, text, panel.unit) for place, text in entry.more.items()]


def _make_axes(panels: Sequence[Panel]) -> tuple[Figure, list[tuple[Axes, Axes | None]]]:
    """Return a figure, and upper and lower axes for each panel; the lower axes are None without published numbers."""
    from matplotlib.figure import Figure

    rows: list[list[Panel]] = [[]]
    for panel in panels:
        if rows[-1] and sum(p.bars for p in rows[-1]) + panel.bars > MAX_ROW_BARS:
            rows.append([])
        rows[-1].append(panel)
    figure = Figure(figsize=(style.WIDTH_INCHES, 0.7 + 3.3 * len(rows)), layout="constrained")
    outer = figure.add_gridspec(len(rows), 1)
    grid: list[tuple[Axes, Axes | None]] = []
    for number, row in enumerate(rows):
        widths = [panel.bars + 5 for panel in row]
        inner = outer[number].subgridspec(2, len(row), height_ratios=[2.6, 1], width_ratios=widths)
        for column, panel in enumerate(row):
            upper = figure.add_subplot(inner[0 if panel.compared else slice(None), column])
            lower = figure.add_subplot(inner[1, column], sharex=upper) if panel.compared else None
            grid.append((upper, lower))
    return figure, grid


def _draw_values(axes: Axes, panel: Panel, colours: dict[str, str], view: View) -> None:
    size = 1e9 if panel.unit == "parameters" else 1.0
    for name, values in panel.series:
        for value in values:
            draw_bars(axes, panel.slot(value, name), value, colours[name], size)
    axes.set_ylim(0, 1.12 * max(axes.dataLim.y1, 1e-9))
    lines = [panel.entry.title] if panel.entry.title else []
    lines += [_row_words(reference, view) for reference in panel.entry.words]
    if panel.entry.words:
        axes.set_title("\n".join(lines), fontsize=8.5, fontweight="normal")
    elif lines:
        axes.set_title(lines[0])
    axes.set_ylabel(panel.entry.label)
    style.set_grid(axes, "y")
    _set_places(axes, panel, view, labelled=not panel.compared)


def _draw_errors(axes: Axes, panel: Panel, colours: dict[str, str], view: View) -> None:
    """Draw relative errors of our values, with the tolerance as a band; values that agree have filled marks."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    metrics = {value.metric for value in panel.values if value.published}
    tolerated = max((RELATIVE_TOLERANCE[metric] for metric in metrics), default=0.0)
    if tolerated:
        axes.axhspan(-tolerated, tolerated, color=style.GREY, alpha=0.22, lw=0)
    axes.axhline(0, color=style.INK, lw=0.8)
    errors = [0.0]
    for name, values in panel.series:
        for value in values:
            at = panel.slot(value, name)
            errors.append(draw_error(axes, at, value, colours[name], MAX_DRAWN_ERROR))
    low, high = min(min(errors), -tolerated, -0.1), max(max(errors), tolerated, 0.1)
    axes.set_ylim(low - 0.32 * (high - low), high + 0.32 * (high - low))
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylabel("ours less\npublished", fontsize=8)
    style.set_grid(axes, "y")
    _set_places(axes, panel, view, labelled=True)


def _set_places(axes: Axes, panel: Panel, view: View, *, labelled: bool) -> None:
    """Set the labels on a panel's horizontal axis; below them, original texts of published values if requested."""
    under: dict[str, str] = {}
    if panel.entry.under:
        pattern = panel.entry.under
        rows = {value.at: pattern.replace("*", value.at) for value in view.matching(pattern)}
        under = {at: "\n" + _in_two_lines(view.row(name).row.published) for at, name in rows.items()}
    axes.set_xticks(range(len(panel.places)), [f"{at}{under.get(at, '')}" for at in panel.places])
    axes.set_xlim(-0.55, len(panel.places) - 0.45)
    axes.tick_params(axis="x", length=0, labelbottom=labelled)
    if labelled and panel.entry.across:
        axes.set_xlabel(panel.entry.across)


def _in_two_lines(words: str) -> str:
    """Return the text of a published configuration in two lines, in which names such as `P_os` have subscripts."""
    first, _, rest = _INDEXED_NAME.sub(r"$\1_{\2}$", words).partition(", ")
    return f"{first}\n{rest}" if rest else first


def _row_words(reference: str, view: View) -> str:
    result = view.row(reference)
    ours = next((f"{f.kind}: {f.verdict}" for f in result.findings if f.decided), "not run")
    return f"published, {result.row.label}: {result.row.published} ({ours})"


def _caption(entry: FigureEntry, values: Sequence[Value]) -> str:
    compared = [value for value in values if value.published and value.predicted]
    printed = [value for value in values if value.published]
    parts = [entry.text]
    predicted = [value.predicted for value in compared if value.predicted]
    if compared:
        kinds = ", ".join(sorted({ours.kind for ours in predicted})).capitalize()
        accepted = sum(ours.agrees is True for ours in predicted)
        parts.append(
            f"{kinds}: {accepted} of {len(compared)} values are within the tolerance of their claim."
        )
    if any(ours.kind == SIMULATED and ours.high > ours.low for ours in predicted):
        parts.append(
            "Whiskers and pale bands: 90 % interval of the simulated value, due to uncertain inputs."
        )
    lacking = len(printed) - len(compared)
    if printed and lacking:
        parts.append(f"The results folder has no result for {lacking} of {len(printed)} published values.")
    bases = count_bases(ours.rests_on for value in values for ours in value.ours if ours is value.predicted)
    parts += [bases] if bases else []
    parts.append(_claims_sentence(entry))
    return " ".join(parts)


def _claims_sentence(entry: FigureEntry) -> str:
    return f"Claims: {', '.join(entry.claims)}."
