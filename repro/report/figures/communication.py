"""Figures of communication volume: measured bytes by ZeRO stage, and simulated bytes by class of link."""

from __future__ import annotations

from typing import Any

from repro.report.figures import style
from repro.report.figures.style import Drawing, Record
from repro.results.schema import SIMULATED
from repro.util import units

VOLUME = Drawing(
    "communication",
    "Communication volume by stage",
    "No record of states-z0-dp2 and of stages to compare with it.",
    missing="repro run suites/smoke.toml",
)
PUBLISHED_VOLUMES = {
    style.STAGE_NAMES[0]: 1.0,
    style.STAGE_NAMES[1]: 1.0,
    style.STAGE_NAMES[2]: 1.0,
    style.STAGE_NAMES[3]: 1.5,
    f"{style.STAGE_NAMES[1]}, Feb 2020": 1.5,
}
"""1910.02054 sec. 7.1-7.2; the release of February 2020 reduced with an all-reduce, 3 Psi for 2 Psi."""
DEGREE_COLOURS = (style.BLUE, style.ORANGE, style.GREEN)


def draw_volume(records: list[Record]) -> Drawing:
    """Draw the bytes counted at the collectives (ring algorithms) as bars, and the published ratio as lines."""
    ended = style.successful_records(records, "states-") + style.successful_records(
        records, "comm-z1-allreduce"
    )
    divided = [r for r in ended if style.dp_degree(r) > 1]
    base = {
        _model_and_degree(r): sent_bytes(r) for r in divided if style.zero_stage(r) == 0 and sent_bytes(r) > 0
    }
    shown = [r for r in divided if _model_and_degree(r) in base]
    shown.sort(key=lambda r: (_stage_column(r), style.dp_degree(r)))
    if not shown:
        return VOLUME
    import pandas as pd
    import seaborn as sns

    degrees = sorted({style.dp_degree(r) for r in shown})
    names = list(PUBLISHED_VOLUMES)

    frame = pd.DataFrame(
        {
            "stage": [names[_stage_column(r)] for r in shown],
            "ratio": [sent_bytes(r) / base[_model_and_degree(r)] for r in shown],
            "degree": [f"measured, Nd = {style.dp_degree(r)}" for r in shown],
        }
    )
    figure, axes = style.make_axes(3.3)
    look: dict[str, Any] = {"palette": DEGREE_COLOURS[: len(degrees)], "saturation": 1, "lw": 0, "gap": 0.08}
    sns.barplot(frame, x="stage", y="ratio", hue="degree", order=names, errorbar=None, ax=axes, **look)
    for bars in axes.containers:
        axes.bar_label(bars, fmt="%.4f", padding=3, fontsize=8)
    ends = ([place + side for place in range(len(names))] for side in (-0.45, 0.45))
    axes.hlines(list(PUBLISHED_VOLUMES.values()), *ends, color=style.INK, lw=2, zorder=3, label="published")
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, 1.85), yticks=[0, 0.5, 1, 1.5])
    axes.set(xlabel="", ylabel="bytes sent, relative to DP")
    style.set_grid(axes, "y")
    axes.legend(ncols=len(degrees) + 1, loc="upper left", bbox_to_anchor=(0, 1.12))

    caption = (
        "Bytes that one rank sends over the data-parallel group in one ordinary step, divided by those of "
        "plain data parallelism with the same model and Nd. Lines: the published 1x, 1x, 1x and 1.5x; the "
        "release of February 2020 sent 1.5x under P_os as well. Small collectives, such as that of the "
        "gradient norm, count."
    )
    wanted = {(column, nd) for column in range(len(names)) for nd in (2, 4)}
    missing = not wanted <= {(_stage_column(r), style.dp_degree(r)) for r in shown}
    return VOLUME.drawn(figure, caption, (r.label for r in shown), missing=missing)


def sent_bytes(record: Record) -> float:
    """Return the bytes that rank 0 sends over the data-parallel group in one step."""
    return float(sum(row.sent_bytes for row in record.comm if row.group == "dp"))


def _model_and_degree(record: Record) -> tuple[str, int]:
    return record.experiment.model.name, style.dp_degree(record)


def _stage_column(record: Record) -> int:
    if record.experiment.layout.zero1_reduce == "all-reduce":
        return len(PUBLISHED_VOLUMES) - 1
    return style.zero_stage(record)


LINKS_MODELS = ("1.5b", "8b", "40b", "60b", "80b", "100b", "120b", "140b", "170b")
"""Models of ZeRO's Figure 2."""
LINKS_PANELS = (("zero", "ZeRO-100B"), ("megatron", "Megatron-LM"))
LINKS_COMMAND = "repro run suites/zero_throughput.toml --evidence simulated --only 'fig2-*'"
LINKS = Drawing(
    "links",
    "Communication by class of link",
    "No simulated record of ZeRO's Figure 2 in the store.",
    missing=LINKS_COMMAND,
    evidence=SIMULATED,
)
LINK_NAMES = {"nvlink": "in the node (NVLink)", "inter-node": "between nodes"}
LINK_STYLES = {LINK_NAMES["nvlink"]: (style.BLUE, "o"), LINK_NAMES["inter-node"]: (style.VERMILION, "s")}
"""Colour and marker of a class of links."""


def draw_link_traffic(simulated: list[Record]) -> Drawing:
    """Draw one panel per system and one line per model: bytes that all GPUs send for one sample, by class of link."""
    records = {r.label: r for r in simulated if r.conclusive and "comm.sent_bytes" in r.metrics}
    found = {
        (model, system): records[name]
        for model in LINKS_MODELS
        for system, _ in LINKS_PANELS
        if (name := f"zero_throughput/fig2-{model}-{system}") in records
    }
    if not found:
        return LINKS
    import pandas as pd

    rows = [
        (value, LINKS_MODELS.index(model), LINK_NAMES[name], system)
        for (model, system), record in found.items()
        for name, value in sample_bytes_by_link(record).items()
    ]
    sent = pd.DataFrame(rows, columns=["bytes", "place", "class", "system"])
    figure, grid = style.make_axes(3.6, 1, 2, sharex=True, sharey=True)
    for axes, (system, title) in zip(grid, LINKS_PANELS, strict=True):
        for y, model in enumerate(LINKS_MODELS):
            if (model, system) not in found:
                at = {"xycoords": ("axes fraction", "data"), "color": style.MUTED, "fontsize": 8}
                axes.annotate("no record", (0.5, y), **at)
        shown = sent[sent["system"] == system]
        ends = shown.groupby("place")["bytes"].agg(["min", "max"])
        axes.hlines(ends.index, ends["min"], ends["max"], color=style.MUTED, lw=1, zorder=1)
        style.scatter_by(axes, shown, "class", LINK_STYLES, s=42, edgecolor=style.INK, lw=0.5)
        axes.set(title=title, xscale="log", xlabel="bytes that all GPUs send for one sample", ylabel="")
        axes.xaxis.set_major_formatter(lambda value, _: units.size(value))
        style.set_grid(axes, "x")
    grid[0].set_yticks(range(len(LINKS_MODELS)), [model.upper() for model in LINKS_MODELS])
    grid[0].set_ylim(len(LINKS_MODELS) - 0.5, -0.5)
    style.draw_legend_above(figure, LINK_STYLES, ncols=2)
    caption = (
        "Simulated, not measured: counted where the step calls its collectives, by the slowest class of links that a "
        "group crosses, ring algorithms, over the samples of a step; layouts of the paper's Figure 2. Where model "
        "parallelism leaves the node, all of its traffic does. No source prints these bytes."
    )
    missing = len(found) < len(LINKS_MODELS) * len(LINKS_PANELS)
    return LINKS.drawn(figure, caption, (r.label for r in found.values()), missing=missing)


def sample_bytes_by_link(record: Record) -> dict[str, float]:
    """Return the bytes for one sample over all GPUs, by class of link, without classes that have no traffic."""
    layout, metrics = record.experiment.layout, record.metrics
    ranks = layout.dp * layout.tp * layout.pp
    sent = {name: metrics.get(f"comm.link.{name}.sent_bytes", 0) for name in LINK_NAMES}
    return {name: ranks * value / layout.global_batch for name, value in sent.items() if value}
