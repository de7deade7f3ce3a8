"""Figures of model-state memory and communication volume by ZeRO stage, of small measured and published models."""

from __future__ import annotations

from collections import Counter
from typing import Any

from repro.model.counts import states_bytes
from repro.report.figures import style
from repro.report.figures.style import Drawing, Record
from repro.report.figures.values import Value, View
from repro.results.schema import SIMULATED
from repro.util import units

STATE_PARTS = ("parameters", "gradients", "optimizer")
PART_COLOURS = {part: style.CATEGORY_COLOURS[part] for part in STATE_PARTS}
MEASURED_STATES = Drawing(
    "states",
    "Memory of model states by ZeRO stage and Nd",
    "The results folder has no record of the experiments states-*.",
    missing="repro run suites/smoke.toml --only 'states-*'",
)
MEASURED_LAYOUTS = {(stage, nd) for stage in range(4) for nd in (1, 2, 4)}
"""Pairs (ZeRO stage, data-parallel degree Nd) of all bars in the figure of measured model states."""
FORMULA_MARK: dict[str, Any] = {
    "marker": "D",
    "color": "white",
    "markeredgecolor": style.INK,
    "linestyle": "none",
}
STAGE_FORMULAS = {0: "16Ψ", 1: "4Ψ + 12Ψ/Nd", 2: "2Ψ + 14Ψ/Nd", 3: "16Ψ/Nd"}


def draw_measured_states(records: list[Record]) -> Drawing:
    """Draw measured bytes of model states per parameter on the fullest rank (bars), and ZeRO's formula (diamonds)."""
    from matplotlib.lines import Line2D

    states = filter(style.has_memory_categories, style.successful_records(records, "states-"))
    shown = [r for r in states if r.experiment.layout.precision != "fp32"]
    if not shown:
        return MEASURED_STATES
    models = Counter(r.experiment.model.name for r in shown)
    model = models.most_common(1)[0][0]  # The right axis, in bytes, is valid for one model only.
    shown = [r for r in shown if r.experiment.model.name == model]
    shown.sort(key=lambda r: (r.experiment.layout.dp, r.experiment.layout.zero))
    psi = shown[0].metrics["parameters"]
    degrees = sorted({r.experiment.layout.dp for r in shown})
    places = [5 * degrees.index(r.experiment.layout.dp) + r.experiment.layout.zero for r in shown]

    figure, axes = style.make_axes(3.7)
    worst = 0.0
    for x, record in zip(places, shown, strict=True):
        parts = {part: record.metrics[f"memory.{part}_bytes"] / psi for part in STATE_PARTS}
        base = style.draw_stacked_bar(axes, x, parts, PART_COLOURS, 0.8, across=False)
        style.write_near(axes, f"{base:.2f}", (x, base), (0, 6), ha="center", fontsize=8)
        formula = states_bytes(1, record.experiment.layout.dp, record.experiment.layout.zero)
        axes.plot(x, formula, markersize=5.5, **FORMULA_MARK)
        worst = max(worst, abs(record.metrics["memory.states_bytes"] / psi / formula - 1))
    axes.set_xticks(places, [style.STAGE_NAMES[r.experiment.layout.zero] for r in shown])
    for degree in degrees:
        middle = 5 * degrees.index(degree) + 1.5
        at = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "weight": "bold"}
        axes.text(middle, -0.14, f"Nd = {degree}", **at)
    axes.set(ylabel="bytes per parameter and rank", ylim=(0, 19.5), yticks=range(0, 17, 4))
    right = axes.secondary_yaxis("right", functions=(lambda y: y * psi / 1e6, lambda y: y * 1e6 / psi))
    right.set_ylabel(f"MB per rank (Ψ = {psi:,.0f})")
    right.spines["right"].set_visible(True)
    right.spines["right"].set_color(style.MUTED)
    style.set_grid(axes, "y")
    precision = "/".join(sorted({r.experiment.layout.precision for r in shown}))
    notes = {"parameters": precision, "gradients": precision, "optimizer": "fp32 master, m, v"}
    fills = {f"{part} ({notes[part]})": colour for part, colour in PART_COLOURS.items()}
    style.draw_fills_above(figure, fills, Line2D([], [], label="formula", **FORMULA_MARK), ncols=4)

    caption = (
        f"Model states of {model} between steps, measured as the sizes of the tensors' storages on the "
        f"fullest rank. Diamonds: {', '.join(STAGE_FORMULAS.values())} with K = 12 (ZeRO paper, sec. 5). "
    )
    if worst:
        caption += f"Largest difference between bar and diamond: {units.number(100 * worst)} %; "
        caption += "shards are padded to equal sizes."
    else:
        caption += "Bars and diamonds are equal to the byte."
    missing = not {(r.experiment.layout.zero, r.experiment.layout.dp) for r in shown} >= MEASURED_LAYOUTS
    return MEASURED_STATES.drawn(figure, caption, (r.label for r in shown), missing=missing)


PUBLISHED_STATES = Drawing(
    "zero-fig1",
    "ZeRO, Figure 1: model states of 7.5B on 64 GPUs",
    "Bytes of model states on one GPU, Ψ = 7.5e9, Nd = 64, K = 12. Bars are counted on the tensors of the real "
    "step, traced on shapes; the formulas are those of sections 5.1 to 5.3. Claim: zero-fig1-7p5b.",
    missing="repro run suites/zero_memory.toml --evidence simulated --only '7.5b-z*-n64'",
    evidence=SIMULATED,
)


def draw_published_states(view: View, simulated: list[Record]) -> Drawing:
    """Draw model states by ZeRO stage: simulated bytes (bars), published bytes (outlines) and formula (diamonds)."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    values = view.matching("zero-fig1-7p5b/*")
    records = {record.label: record for record in simulated}
    figure, axes = style.make_axes(3.6)
    drawn: list[str] = []
    for y, value in enumerate(values):
        printed, ours, formula = value.published, value.of_kind(SIMULATED), value.of_kind("analytic")
        assert printed is not None
        record = records.get(ours.runs[0]) if ours else None
        if record:
            drawn.append(record.label)
            sizes = {part: record.metrics[f"memory.{part}_bytes"] / units.GB for part in STATE_PARTS}
            style.draw_stacked_bar(axes, y, sizes, PART_COLOURS, 0.56, across=True)
        axes.barh(y, printed.value, 0.74, facecolor="none", edgecolor=style.INK, lw=1.3, zorder=3)
        if formula:
            kw: dict[str, Any] = {"s": 30, "marker": "D", "edgecolors": "white", "lw": 0.8}
            axes.scatter(formula.value, y, color=style.INK, zorder=4, **kw)
        end = max([printed.value, *(found.value for found in value.ours)])
        style.write_near(axes, _value_label(value), (end, y), (9, 0), va="center", fontsize=8.5)
    axes.set_yticks(range(len(values)), [style.STAGE_NAMES[stage] for stage in range(len(values))])
    axes.set(xlabel="GB per GPU", ylim=(len(values) - 0.5, -0.5))
    axes.set_xlim(0, 1.5 * max(value.published.high for value in values if value.published))
    style.set_grid(axes, "x")
    fills = {f"{part}, simulated": colour for part, colour in PART_COLOURS.items() if drawn}
    outline = Patch(facecolor="none", edgecolor=style.INK, label="published")
    diamond = Line2D([], [], marker="D", color=style.INK, ls="none", markersize=5, label="formula (analytic)")
    style.draw_fills_above(figure, fills, outline, diamond, ncols=5)
    missing = len(drawn) < len(values)
    return PUBLISHED_STATES.drawn(figure, PUBLISHED_STATES.caption, drawn, missing=missing)


def _value_label(value: Value) -> str:
    parts = [f"published {value.published.text if value.published else ''}"]
    for kind in (SIMULATED, "analytic"):
        found = value.of_kind(kind)
        parts.append(f"{kind} {found.value:.4g}" if found else f"{kind}: not run")
    return ", ".join(parts)


VOLUME = Drawing(
    "communication",
    "Communication volume by ZeRO stage",
    "The results folder lacks records of states-z0-dp2 or of other ZeRO stages.",
    missing="repro run suites/smoke.toml",
)
PUBLISHED_VOLUMES = {
    style.STAGE_NAMES[0]: 1.0,
    style.STAGE_NAMES[1]: 1.0,
    style.STAGE_NAMES[2]: 1.0,
    style.STAGE_NAMES[3]: 1.5,
    f"{style.STAGE_NAMES[1]}, Feb 2020": 1.5,
}
"""Published communication volume of each ZeRO stage over that of DP (1910.02054 sec. 7.1-7.2). DeepSpeed's release of
February 2020 reduced gradients with an all-reduce, so P_os sent 3 Psi instead of 2 Psi."""
DEGREE_COLOURS = (style.BLUE, style.ORANGE, style.GREEN)


def draw_volume(records: list[Record]) -> Drawing:
    """Draw the sent bytes of ZeRO stages over those of plain data parallelism (bars), and published ratios (lines)."""
    prefixes = ("states-", "comm-z1-allreduce")
    ended = [record for prefix in prefixes for record in style.successful_records(records, prefix)]
    divided = [r for r in ended if r.experiment.layout.dp > 1]
    plain = [r for r in divided if r.experiment.layout.zero == 0 and sent_bytes(r) > 0]
    base = {_model_and_degree(r): sent_bytes(r) for r in plain}
    shown = [r for r in divided if _model_and_degree(r) in base]
    shown.sort(key=lambda r: (_stage_column(r), r.experiment.layout.dp))
    if not shown:
        return VOLUME
    import pandas as pd
    import seaborn as sns

    degrees = sorted({r.experiment.layout.dp for r in shown})
    names = list(PUBLISHED_VOLUMES)

    frame = pd.DataFrame(
        {
            "stage": [names[_stage_column(r)] for r in shown],
            "ratio": [sent_bytes(r) / base[_model_and_degree(r)] for r in shown],
            "degree": [f"measured, Nd = {r.experiment.layout.dp}" for r in shown],
        }
    )
    figure, axes = style.make_axes(3.3)
    kw: dict[str, Any] = {"palette": DEGREE_COLOURS[: len(degrees)], "saturation": 1, "lw": 0, "gap": 0.08}
    sns.barplot(frame, x="stage", y="ratio", hue="degree", order=names, errorbar=None, ax=axes, **kw)
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
        "release of February 2020 sent 1.5x under P_os as well. Small collectives, such as the all-reduce of the "
        "gradient norm, are included."
    )
    wanted = {(column, nd) for column in range(len(names)) for nd in (2, 4)}
    missing = not wanted <= {(_stage_column(r), r.experiment.layout.dp) for r in shown}
    return VOLUME.drawn(figure, caption, (r.label for r in shown), missing=missing)


def sent_bytes(record: Record) -> float:
    """Return the bytes that rank 0 sends over the data-parallel group in one step."""
    return float(sum(row.sent_bytes for row in record.comm if row.group == "dp"))


def _model_and_degree(record: Record) -> tuple[str, int]:
    return record.experiment.model.name, record.experiment.layout.dp


def _stage_column(record: Record) -> int:
    if record.experiment.layout.zero1_reduce == "all-reduce":
        return len(PUBLISHED_VOLUMES) - 1
    return record.experiment.layout.zero


LINKS_MODELS = ("1.5b", "8b", "40b", "60b", "80b", "100b", "120b", "140b", "170b")
"""Sizes of the models in Figure 2 of the ZeRO paper."""
LINKS_PANELS = (("zero", "ZeRO-100B"), ("megatron", "Megatron-LM"))
LINKS = Drawing(
    "links",
    "Communication by class of link",
    "The results folder has no simulations of Figure 2 of the ZeRO paper.",
    missing="repro run suites/zero_throughput.toml --evidence simulated --only 'fig2-*'",
    evidence=SIMULATED,
)
LINK_NAMES = {"nvlink": "in the node (NVLink)", "inter-node": "between nodes"}
LINK_STYLES = {LINK_NAMES["nvlink"]: (style.BLUE, "o"), LINK_NAMES["inter-node"]: (style.VERMILION, "s")}
"""Colour and marker of each class of links, inside and between nodes."""


def draw_link_traffic(simulated: list[Record]) -> Drawing:
    """Draw the bytes that all GPUs send per sample inside and between nodes, for ZeRO-100B and Megatron-LM."""
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
        "Simulated, not measured: bytes of all collectives of a step with ring algorithms, per sample, by the slowest "
        "class of links in a group; layouts of the paper's Figure 2. If a model-parallel group has several nodes, all "
        "of its traffic counts as inter-node. No source prints these bytes."
    )
    missing = len(found) < len(LINKS_MODELS) * len(LINKS_PANELS)
    return LINKS.drawn(figure, caption, (r.label for r in found.values()), missing=missing)


def sample_bytes_by_link(record: Record) -> dict[str, float]:
    """Return the bytes that all GPUs send per sample, by class of link, without classes that have no traffic."""
    layout, metrics = record.experiment.layout, record.metrics
    ranks = layout.dp * layout.tp * layout.pp
    sent = {name: metrics.get(f"comm.link.{name}.sent_bytes", 0) for name in LINK_NAMES}
    return {name: ranks * value / layout.global_batch for name, value in sent.items() if value}
