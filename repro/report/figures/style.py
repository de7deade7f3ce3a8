"""One look for all figures: colours that colour-blind readers tell apart, one font, thin frames."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from repro.results.schema import ComparisonRecord, ExperimentRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record: TypeAlias = ExperimentRecord

WIDTH = 9.5
"""Inches; the page shows figures at most this wide."""
INK, MUTED, GRID = "#1d2530", "#5d6875", "#dfe4ea"
# Okabe and Ito's colours, in an order in which neighbours also differ in lightness.
BLUE, ORANGE, GREEN, YELLOW, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#9aa3ad"
VERMILION, SKY = "#d55e00", "#56b4e9"
CATEGORY = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PURPLE,
    "checkpoints": VERMILION,
    "communication": YELLOW,
    "other": GREY,
    "host": SKY,
}
"""Colours of the categories of memory, the same in every figure; `host` is not on the device."""
STAGE = {0: "DP", 1: "$P_{os}$", 2: "$P_{os+g}$", 3: "$P_{os+g+p}$"}
"""The ZeRO paper's names of the stages, as the paper sets them."""


@dataclass(frozen=True)
class Drawing:
    """A figure, the records it shows, and what to run where they are missing."""

    id: str
    """File name without its ending, and the anchor in the page."""
    title: str
    caption: str
    records: tuple[str, ...]
    """`suite/name` of every record that the figure shows."""
    missing: str = ""
    """What would fill an empty figure, or complete one; empty where nothing is missing."""
    figure: Figure | None = None
    """None where there is nothing to draw."""
    evidence: str = "measured"
    """The kind of the records, which is where the page has them."""


def settle(figure: Figure) -> None:
    """Lay the figure out for good: every later drawing would do it again, which takes as long as the drawing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        # Axes of a fixed aspect give back room, which only a second turn sees.
        for _ in range(2 if any(axes.get_aspect() != "auto" for axes in figure.axes) else 1):
            engine.execute(figure)
        figure.set_layout_engine(None)  # "none" leaves an engine for whose sake savefig draws twice


def svg(drawing: Drawing) -> str:
    """The figure as an `<svg>` element with text as text, its ids made unique in the page."""
    assert drawing.figure is not None
    out = io.StringIO()
    with look():
        settle(drawing.figure)
        drawing.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r'\bid="', f'id="{drawing.id}-', text)
    text = re.sub(r"url\(#", f"url(#{drawing.id}-", text)
    text = re.sub(r'href="#', f'href="#{drawing.id}-', text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # The page scales it: width and height become the view box alone.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{drawing.title}"', 1)


def png(drawing: Drawing) -> bytes:
    """The figure as a PNG of 160 dots per inch on white."""
    assert drawing.figure is not None
    out = io.BytesIO()
    with look():
        settle(drawing.figure)
        drawing.figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()


@contextmanager
def look() -> Iterator[None]:
    """Thin frames, our font and colours, for drawing and for saving alike."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "repro",
        "font.family": "DejaVu Sans",
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
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "white",
        "figure.facecolor": "white",
        "lines.solid_capstyle": "round",
        "patch.edgecolor": "white",
        "patch.force_edgecolor": True,
    }
    with matplotlib.rc_context(settings):
        yield


def canvas(
    height: float, rows: int = 1, columns: int = 1, *, width: float = WIDTH, **keywords: Any
) -> tuple[Figure, Any]:
    """A figure of the page's width that no global state knows, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **keywords)


def quiet(axes: Axes, axis: str) -> None:
    """Grid lines across `axis` only."""
    axes.grid(visible=True, axis=axis)  # type: ignore[arg-type]
    axes.tick_params(length=3)


def label(record: ExperimentRecord | ComparisonRecord) -> str:
    """`suite/name`, as claims and captions cite records."""
    return record.at


def zero(record: Record) -> int:
    """The record's ZeRO stage."""
    return int(record.experiment.layout.zero)


def dp(record: Record) -> int:
    """The record's data-parallel degree Nd."""
    return int(record.experiment.layout.dp)


def succeeded(records: list[Record], prefix: str) -> list[Record]:
    """Measured experiments that ended ok and whose names start with `prefix`."""
    return [r for r in records if r.outcome == "ok" and r.name.startswith(prefix)]
