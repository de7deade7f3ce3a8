"""Common style of all figures: seaborn's theme in the page's font and colours, suitable for colour-blind readers.

Seaborn draws grouped bars, points by class and maps from tidy frames. This package adds stacked bars
(`draw_stacked_bar`), published values with simulated and measured ones (`values.py`), and schedules
(`schedules.py`).
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from repro.results.schema import ExperimentRecord

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

Record: TypeAlias = ExperimentRecord

WIDTH_INCHES = 9.5
"""Maximum width of a figure on a page of the HTML report, in inches."""
INK, MUTED, GRID = "#1d2530", "#5d6875", "#dfe4ea"
"""Colours of text, secondary text and grid lines: `--ink`, `--muted` and `--line` in `page/templates/style.css`."""
DARK_THEME = {INK: "#e4e9ee", MUTED: "#9fabb7", GRID: "#36404b", "#ffffff": "#14191f"}
"""Colour in the report's dark theme, by the colour of the light theme that it replaces."""
# Okabe and Ito's colours for colour-blind readers, in an order in which neighbours also differ in lightness.
BLUE, ORANGE, GREEN, YELLOW, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#9aa3ad"
VERMILION, SKY, RED = "#d55e00", "#56b4e9", "#c1121f"
CATEGORY_COLOURS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PURPLE,
    "checkpoints": VERMILION,
    "communication": YELLOW,
    "other": GREY,
    "host": SKY,
}
"""Colours of the categories of device memory, and of `host` memory, in all figures."""
STAGE_NAMES = {0: "DP", 1: "$P_{os}$", 2: "$P_{os+g}$", 3: "$P_{os+g+p}$"}
"""Names of ZeRO stages 0 to 3, typeset as in the ZeRO paper."""


@dataclass(frozen=True)
class Drawing:
    """Figure of the HTML report: title, caption, records, and command for missing records; `drawn` adds the picture."""

    id: str
    """Name of the figure's files without suffix, and of its anchor on the page."""
    title: str
    caption: str
    records: tuple[str, ...] = ()
    """`suite/name` of every record that the figure shows."""
    missing: str = ""
    """Command that creates the missing records of the figure; empty for a complete figure."""
    figure: Figure | None = None
    """Matplotlib figure; None if the results folder has no data for it."""
    evidence: str = "measured"
    """Kind of evidence of the figure's records, `measured` or `simulated`."""

    def drawn(self, figure: Figure, caption: str, records: Iterable[str], *, missing: bool | str) -> Drawing:
        """Return this figure with a picture. `missing`: commands for missing records; True: the figure's command."""
        command = self.missing if missing is True else missing or ""
        return replace(self, figure=figure, caption=caption, records=tuple(records), missing=command)


def fix_layout(figure: Figure) -> None:
    """Compute the positions of a figure's axes once and store them, as each computation takes as long as drawing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        # Axes with a fixed aspect ratio leave space unused, which a second pass of the layout engine distributes.
        for _ in range(2 if any(axes.get_aspect() != "auto" for axes in figure.axes) else 1):
            engine.execute(figure)
        # None removes the layout engine. The string "none" leaves one, with which `savefig` draws twice.
        figure.set_layout_engine(None)


def to_svg(drawing: Drawing) -> str:
    """Return the figure as an `<svg>` element with selectable text and colours for light and dark pages."""
    text = _render(drawing, format="svg", metadata={"Date": None, "Creator": None}).decode()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace("<svg", f'<svg role="img" aria-label="{drawing.title}"', 1)
    return text.replace("</svg>", f"{_dark_rules()}</svg>")


def _dark_rules() -> str:
    """Return CSS rules that recolour a figure on a dark page, except for white text on a coloured background."""
    rules = [
        f'{":not(text)" * (light == "#ffffff")}:is([style*="{name}: {light}"], [{name}="{light}"])'
        f" {{ {name}: {dark} !important }}"
        for light, dark in DARK_THEME.items()
        for name in ("fill", "stroke")
    ]
    return f"<style>@media screen and (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"


def to_png(drawing: Drawing) -> bytes:
    """Return the figure as a PNG of 160 dots per inch on white."""
    return _render(drawing, format="png", dpi=160, metadata={"Software": None})


def _render(drawing: Drawing, **options: Any) -> bytes:
    assert drawing.figure is not None
    out = io.BytesIO()
    with figure_style():
        fix_layout(drawing.figure)
        drawing.figure.savefig(out, **options)
    return out.getvalue()


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply seaborn's theme `ticks` with the report's font and colours while figures are drawn or saved."""
    # Hide matplotlib's warning about a temporary cache, which appears if the home folder is not writable.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib
    import seaborn

    settings: Any = {
        **seaborn.axes_style("ticks"),
        "svg.fonttype": "none",
        "svg.hashsalt": "repro",
        "font.family": "DejaVu Sans",
        # Hinting rounds the widths of letters to pixels, which displaces small text in an SVG.
        "text.hinting": "none",
        "font.size": 9,
        "mathtext.fontset": "dejavusans",
        "mathtext.default": "regular",
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        yield


def make_axes(
    height: float, rows: int = 1, columns: int = 1, *, width: float = WIDTH_INCHES, **keywords: Any
) -> tuple[Figure, Any]:
    """Return a new matplotlib figure of the page's width and its axes, without changing pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **keywords)


def draw_stacked_bar(
    axes: Axes, at: float, parts: Mapping[str, float], fills: Mapping[str, Any], size: float, *, across: bool
) -> float:
    """Draw one stacked bar of `parts`, in the order and the colours of `fills`, and return its length.

    `at`: position of the bar. `size`: its thickness. `across`: whether it is horizontal.
    """
    end = 0.0
    for name, filled in fills.items():
        if length := parts.get(name, 0):
            fill = filled if isinstance(filled, dict) else {"color": filled, "edgecolor": "white", "lw": 0.4}
            if across:
                axes.barh(at, length, size, left=end, zorder=2, **fill)
            else:
                axes.bar(at, length, size, bottom=end, zorder=2, **fill)
            end += length
    return end


def scatter_by(
    axes: Axes, frame: DataFrame, by: str, styles: Mapping[str, tuple[str, str]], **style: Any
) -> None:
    """Scatter the first two columns of `frame`; `styles`: colour and marker of a point by its value in column `by`."""
    import seaborn

    x, y, *_ = frame.columns
    names, (colours, markers) = list(styles), zip(*styles.values(), strict=True)
    orders: dict[str, Any] = {"hue_order": names, "style_order": names}
    props: dict[str, Any] = {"palette": list(colours), "markers": list(markers), **style}
    if len(frame):
        seaborn.scatterplot(frame, x=x, y=y, hue=by, style=by, ax=axes, legend=False, **orders, **props)


def draw_fills_above(figure: Figure | Axes, fills: Mapping[str, Any], *more: Artist, **where: Any) -> None:
    """Draw the legend of bars above all axes: fills by label, and artists `more`; `where`: arguments of `legend`."""
    from matplotlib.patches import Patch

    properties = {
        name: fill if isinstance(fill, dict) else {"facecolor": fill} for name, fill in fills.items()
    }
    handles = [Patch(label=name, **fill) for name, fill in properties.items()]
    figure.legend(handles=[*handles, *more], **{"loc": "outside upper center", **where})


def draw_legend_above(figure: Figure, styles: Mapping[str, tuple[str, str]], **where: Any) -> None:
    """Draw the legend of a scatter plot above all axes; `styles`: colour and marker by label, as in `scatter_by`."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=c, marker=m, ls="none", label=name) for name, (c, m) in styles.items()]
    figure.legend(handles=handles, loc="outside upper center", **where)


def write_near(
    axes: Axes, words: str, at: tuple[float, float], offset: tuple[float, float], **kw: Any
) -> None:
    """Write a text into a figure at an `offset` in points from the data coordinates `at`."""
    axes.annotate(words, at, offset, textcoords="offset points", **kw)


def set_grid(axes: Axes, axis: str) -> None:
    """Draw grid lines only at the ticks of one axis of a figure, `axis` (`x` or `y`)."""
    axes.grid(visible=True, axis=axis)  # type: ignore[arg-type]
    axes.tick_params(length=3)


def successful_records(records: list[Record], prefix: str) -> list[Record]:
    """Return the records of experiments with outcome `ok` whose names start with `prefix`."""
    return [r for r in records if r.outcome == "ok" and r.name.startswith(prefix)]


def has_memory_categories(record: Record) -> bool:
    """Return whether a record has memory by category; records of external engines have only the model states."""
    return bool(record.memory_by_rank) and "memory.activations_bytes" in record.metrics


def required_bytes(record: Record) -> float:
    """Return a layout's device bytes: CUDA context and torch's reserved memory, or live memory if it does not fit."""
    reserved = record.metrics.get("memory.reserved_bytes", record.metrics["memory.peak_bytes"])
    return reserved + record.metrics["memory.context_bytes"]
