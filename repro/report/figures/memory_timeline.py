"""Memory over one step by category: what the stages of ZeRO and the parts of ZeRO-R take off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from repro.report.figures.style import CATEGORY, INK, STAGE, Drawing, Record, canvas, zero
from repro.results.schema import SIMULATED
from repro.util import units

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

ID, TITLE = "memory-timeline", "Memory over one step by category"
ROWS = (
    tuple(f"zero_memory/7.5b-z{stage}-n64" for stage in range(4)),
    ("zero_r/fig6-c1-40b", "zero_r/fig7-c2-40b", "zero_r/fig7-c3-40b", "zero_r/fig7-c4-40b"),
)
RUN = (
    "repro run suites/zero_memory.toml --evidence simulated --rerun --only '7.5b-z*-n64'",
    "repro run suites/zero_r.toml --evidence simulated --rerun --only 'fig[67]-c?-40b'",
)
CUT = 1.5
"""Of the limit, where a panel that needs much more is cut."""
NAMES = {"forward": "forward", "backward": "backward", "optimizer": "update"}


def draw(simulated: list[Record]) -> Drawing:
    """A panel a layout: stacked bytes of the fullest role along the device's busy time."""
    records = {record.at: record for record in simulated if record.series.memory}
    rows = [[records.get(name) for name in row] for row in ROWS]
    shown = [record for row in rows for record in row if record]
    missing = " && ".join(run for row, run in zip(rows, RUN, strict=True) if not all(row))
    if not shown:
        return Drawing(
            ID, TITLE, "No simulated record that keeps its memory over time.", (), missing, evidence=SIMULATED
        )
    rows = [row for row in rows if any(row)]
    figure, grid = canvas(
        0.6 + 2.5 * len(rows), len(rows), len(ROWS[0]), squeeze=False, sharey="row", sharex=True
    )
    seen: set[str] = set()
    for row, line in zip(rows, grid, strict=True):
        for number, (record, axes) in enumerate(zip(row, line, strict=True)):
            if record is None:
                axes.set_visible(False)
                continue
            seen |= _panel(axes, record)
            if number == 0:
                axes.set_ylabel("GB live on the GPU")
        _height(line, row)
    for axes in grid[-1]:
        axes.set_xlabel("device's busy time")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = [
        Patch(facecolor=CATEGORY[name], label=name) for name in CATEGORY if name in seen and name != "host"
    ]
    limit = Line2D([], [], color=INK, ls="--", lw=1.2, label="limit of the allocator")
    figure.legend(handles=[*handles, limit], loc="outside upper center", ncols=8, columnspacing=1.1)
    first = shown[0].experiment.model.name
    caption = (
        f"Simulated, not measured: every allocation of the real step, run on shapes. Above: {first} under the "
        "stages of ZeRO on 64 GPUs. Below: 40B on 400 V100 under C1 to C4 of ZeRO-R (figure 7). Time is that of the "
        "device's operators, without waits; of each 96th of it the moment that holds most. Dotted: backward and "
        "update begin."
    )
    return Drawing(ID, TITLE, caption, tuple(r.at for r in shown), missing, figure, SIMULATED)


def stacked(record: Record) -> dict[str, list[float]]:
    """GB by category on the device, of equal lengths."""
    memory = record.series.memory or {}
    unit = memory["unit"] / units.GB
    size = max(len(row) for row in memory["bytes"].values())
    return {
        name: [unit * value for value in (row if len(row) > 1 else row * size)]
        for name, row in memory["bytes"].items()
        if name != "host"
    }


def _panel(axes: Axes, record: Record) -> set[str]:
    bytes_of = stacked(record)
    names = [name for name in CATEGORY if name in bytes_of]
    size = len(bytes_of[names[0]])
    places = [(number + 0.5) / size for number in range(size)]
    axes.stackplot(
        places, [bytes_of[name] for name in names], colors=[CATEGORY[name] for name in names], lw=0
    )
    limit = record.metrics.get("memory.limit_bytes")
    if limit:
        axes.axhline(limit / units.GB, color=INK, ls="--", lw=1.2)
    before = ""
    for part, name, _ in (record.series.memory or {})["phases"]:
        if name in NAMES and name != before:
            if before:
                axes.axvline(part / size, color=INK, lw=0.7, ls=":")
            before = name
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.tick_params(length=3)
    words = "" if record.outcome == "ok" else ", does not fit"
    axes.set_title(f"{_name(record)}{words}", fontsize=8.5)
    return set(names)


def _name(record: Record) -> str:
    if record.suite == "zero_memory":
        return STAGE[zero(record)]
    return record.name.split("-")[1].upper()


def _height(line: Sequence[Axes], row: Sequence[Record | None]) -> None:
    """One height for a row: all of it, or a good part of the limit where one panel is far above the others."""
    most = {
        number: max(map(sum, zip(*stacked(r).values(), strict=True))) for number, r in enumerate(row) if r
    }
    limit = max(r.metrics.get("memory.limit_bytes", 0) / units.GB for r in row if r)
    top = 1.06 * max(limit, *most.values())
    if limit and top > 2 * limit:
        top = CUT * limit
        for number, value in most.items():
            if value > top:
                place: dict[str, Any] = {
                    "xycoords": "axes fraction",
                    "ha": "center",
                    "va": "top",
                    "fontsize": 8,
                }
                box = {"facecolor": "white", "lw": 0, "pad": 1.5}
                line[number].annotate(f"up to {units.number(value)} GB ↑", (0.5, 0.97), bbox=box, **place)
    line[0].set_ylim(0, top)
