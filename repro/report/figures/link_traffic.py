"""Communication by class of link: what a sample costs the wires inside nodes and between them."""

from __future__ import annotations

from repro.report.figures.style import (
    BLUE,
    INK,
    MUTED,
    VERMILION,
    Drawing,
    Record,
    canvas,
    dots,
    legend_above,
    quiet,
)
from repro.results.schema import SIMULATED

ID, TITLE = "links", "Communication by class of link"
MODELS = ("1.5b", "8b", "40b", "60b", "80b", "100b", "120b", "140b", "170b")
"""Of ZeRO's Figure 2."""
PANELS = (("zero", "ZeRO-100B"), ("megatron", "Megatron-LM"))
RUN = "repro run suites/zero_throughput.toml --evidence simulated --only 'fig2-*'"
NAMES = {"nvlink": "in the node (NVLink)", "inter-node": "between nodes"}
CLASSES = {NAMES["nvlink"]: (BLUE, "o"), NAMES["inter-node"]: (VERMILION, "s")}
"""Colour and marker of a class of links."""


def draw(simulated: list[Record]) -> Drawing:
    """One panel a system, one line a model: bytes that all GPUs send for one sample, by class of link."""
    records = {r.at: r for r in simulated if r.conclusive and "comm.sent_bytes" in r.metrics}
    found = {
        (model, system): records[name]
        for model in MODELS
        for system, _ in PANELS
        if (name := f"zero_throughput/fig2-{model}-{system}") in records
    }
    if not found:
        return Drawing(
            ID, TITLE, "No simulated record of ZeRO's Figure 2 in the store.", (), RUN, evidence=SIMULATED
        )
    import pandas as pd

    rows = [
        (value, MODELS.index(model), NAMES[name], system)
        for (model, system), record in found.items()
        for name, value in by_class(record).items()
    ]
    sent = pd.DataFrame(rows, columns=["bytes", "place", "class", "system"])
    figure, grid = canvas(3.6, 1, 2, sharex=True, sharey=True)
    for axes, (system, title) in zip(grid, PANELS, strict=True):
        for y, model in enumerate(MODELS):
            if (model, system) not in found:
                at = {"xycoords": ("axes fraction", "data"), "color": MUTED, "fontsize": 8}
                axes.annotate("no record", (0.5, y), **at)
        shown = sent[sent["system"] == system]
        ends = shown.groupby("place")["bytes"].agg(["min", "max"])
        axes.hlines(ends.index, ends["min"], ends["max"], color=MUTED, lw=1, zorder=1)
        dots(axes, shown, "class", CLASSES, s=42, edgecolor=INK, lw=0.5)
        axes.set(title=title, xscale="log", xlabel="bytes that all GPUs send for one sample", ylabel="")
        axes.xaxis.set_major_formatter(_bytes)
        quiet(axes, "x")
    grid[0].set_yticks(range(len(MODELS)), [model.upper() for model in MODELS])
    grid[0].set_ylim(len(MODELS) - 0.5, -0.5)
    legend_above(figure, CLASSES, ncols=2)
    caption = (
        "Simulated, not measured: counted where the step calls its collectives, by the slowest class of links that a "
        "group crosses, ring algorithms, over the samples of a step; layouts of the paper's Figure 2. Where model "
        "parallelism leaves the node, all of its traffic does. No source prints these bytes."
    )
    missing = RUN if len(found) < len(MODELS) * len(PANELS) else ""
    return Drawing(ID, TITLE, caption, tuple(r.at for r in found.values()), missing, figure, SIMULATED)


def by_class(record: Record) -> dict[str, float]:
    """Bytes for one sample over all GPUs, by class of link; classes that carry nothing are left out."""
    layout, metrics = record.experiment.layout, record.metrics
    ranks = layout.dp * layout.tp * layout.pp
    sent = {name: metrics.get(f"comm.link.{name}.sent_bytes", 0) for name in NAMES}
    return {name: ranks * value / layout.global_batch for name, value in sent.items() if value}


def _bytes(value: float, _: object = None) -> str:
    from repro.util import units

    return units.size(value)
