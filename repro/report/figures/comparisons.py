"""Figures of alternately run experiments: training engines by strategy, and scaled-down runs on emulated networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.config import TwinOf
from repro.config.experiment import TWIN_RATIO
from repro.report.figures import style
from repro.report.figures.style import Drawing, Record
from repro.results.schema import ComparisonRecord
from repro.util.units import GB

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ENGINES = Drawing(
    "engines",
    "Step time, memory and traffic by engine and strategy",
    "The results folder has no comparison of training engines.",
    missing="repro run suites/engines.toml --only 'speed-*'",
)
ENGINE_STYLES = {
    "native": ("this suite", style.BLUE),
    "torch": ("torch", style.ORANGE),
    "deepspeed": ("DeepSpeed", style.GREEN),
    "megatron": ("Megatron-core", style.PURPLE),
}

STRATEGIES = (*style.STAGE_NAMES.values(), "TP", "PP")


class _EngineBar(NamedTuple):
    strategy: str
    engine: str
    value: float
    low: float | None = None
    high: float | None = None


def draw_engines(records: list[Record], comparisons: list[ComparisonRecord]) -> Drawing:
    """Draw bars by strategy and training engine: step time over the native engine's, model states, and sent bytes."""
    shown = {r.key: r for r in style.successful_records(records, "speed-") if r.suite == "engines"}
    turns = [c for c in comparisons if c.baseline.key in shown and c.subject.key in shown]
    if not turns:
        return ENGINES
    members = {key: shown[key] for c in turns for key in (c.baseline.key, c.subject.key)}
    states, sent = [], []
    for record in members.values():
        strategy, name = _strategy_of(record), record.experiment.engine
        states.append(_EngineBar(strategy, name, record.metrics["memory.states_bytes"] / 1e6))
        sent.append(_EngineBar(strategy, name, record.metrics["comm.sent_bytes"] / 1e6))
    times = [_EngineBar(_strategy_of(shown[key]), "native", 1.0) for key in {c.baseline.key for c in turns}]
    for c in turns:
        subject = shown[c.subject.key]
        low, high = (1 / end if end else None for end in (c.high, c.low))
        times.append(_EngineBar(_strategy_of(subject), subject.experiment.engine, 1 / c.ratio, low, high))

    figure, panels = style.make_axes(6.6, rows=3)
    _draw_grouped_bars(panels[0], times, "step time relative to this suite's engine")
    _draw_grouped_bars(panels[1], states, "MB of model states")
    _draw_grouped_bars(panels[2], sent, "MB that rank 0 sends per step")
    here = [name for name in ENGINE_STYLES if any(r.experiment.engine == name for r in members.values())]
    style.draw_fills_above(figure, dict(ENGINE_STYLES[name] for name in here), ncols=len(here))

    libraries = {str(r.software["name"]) for r in members.values() if r.software} - {"repro"}
    rounds = "/".join(map(str, sorted({c.rounds for c in turns})))
    one = next(iter(members.values())).experiment
    caption = (
        f"{one.model.name}, {one.layout.precision}, {one.layout.world} processes, {one.layout.global_batch} samples of "
        f"{one.seq} tokens per step. The engines ran alternately in {rounds} rounds; vertical lines "
        "are 95 % intervals of step times. Model states: bytes after backward on the fullest rank. Sent bytes: those "
        "of ring algorithms, counted at the calls of torch.distributed. "
        f"Libraries: {', '.join(sorted(libraries))}."
    )
    missing = here != list(ENGINE_STYLES)
    return ENGINES.drawn(figure, caption, (r.label for r in members.values()), missing=missing)


def _draw_grouped_bars(axes: Axes, bars: list[_EngineBar], label: str) -> None:
    import pandas as pd
    import seaborn as sns

    frame = pd.DataFrame(bars)
    strategies = [name for name in STRATEGIES if name in set(frame["strategy"])]
    engines = [name for name in ENGINE_STYLES if name in set(frame["engine"])]
    colours = [ENGINE_STYLES[name][1] for name in engines]
    kw: dict[str, Any] = {"palette": colours, "saturation": 1, "errorbar": None, "gap": 0.08, "lw": 0}
    orders: dict[str, Any] = {"order": strategies, "hue_order": engines, "legend": False}
    sns.barplot(frame, x="strategy", y="value", hue="engine", ax=axes, **orders, **kw)
    known = {(bar.strategy, bar.engine): bar for bar in bars}
    for container, engine in zip(axes.containers, engines, strict=False):
        for patch in container:
            middle = patch.get_x() + patch.get_width() / 2
            bar = known[strategies[round(middle)], engine]
            if bar.low and bar.high:
                axes.vlines(middle, bar.low, bar.high, color=style.INK, lw=1)
            at = (middle, bar.high or bar.value)
            style.write_near(axes, f"{bar.value:.3g}", at, (0, 4), ha="center", fontsize=7)
    axes.set(xlabel="", ylabel=label)
    axes.margins(y=0.16)
    style.set_grid(axes, "y")


def _strategy_of(record: Record) -> str:
    layout = record.experiment.layout
    return (
        "TP" if layout.tp > 1 else "PP" if layout.pp > 1 else style.STAGE_NAMES[record.experiment.layout.zero]
    )


SPEEDUP_ROW = "ds-3p75x-lowbw/throughput over Megatron"
"""Published speedup of DeepSpeed over Megatron (`claim/label`), reproduced by runs over several emulated bandwidths."""
LARGER_TWIN_SUITE = "windtunnel_3p75x"
SWEEPS = {
    "windtunnel_between": ("between", "GB/s between nodes of the published system"),
    "windtunnel_within": ("within", "GB/s per GPU inside a node (not published)"),
}
BANDWIDTHS = Drawing(
    "windtunnel",
    "DeepSpeed's speedup of 3.75x by link bandwidth",
    "The results folder has no sweep over the bandwidth of an emulated link.",
    missing="repro run " + " ".join(f"suites/{name}.toml" for name in (*SWEEPS, LARGER_TWIN_SUITE)),
)


class _TwinComparison(NamedTuple):
    """Measured comparison of scaled-down copies (twins) of two published experiments, a subject and its baseline."""

    suite: str
    twin: TwinOf
    """Original experiment, scale and predicted speed ratios of the scaled-down copy of the subject experiment."""
    record: ComparisonRecord

    @property
    def predicted(self) -> tuple[float, float]:
        """Predicted speed ratios, subject over baseline experiment: of originals, and of their scaled-down copies."""
        return self.twin.numbers[TWIN_RATIO]


def draw_bandwidth_sweeps(
    records: Sequence[Record], comparisons: Sequence[ComparisonRecord], published: float | None
) -> Drawing:
    """Draw measured and predicted speed ratios of scaled-down runs by emulated bandwidth, and the `published` ratio."""
    found = _twin_comparisons(records, comparisons)
    shown = {sweep: [p for p in found if p.suite == sweep] for sweep in SWEEPS}
    shown = {sweep: points for sweep, points in shown.items() if len(points) > 1}
    if not shown:
        return BANDWIDTHS
    single = [p for p in found if p.suite == LARGER_TWIN_SUITE]
    figure, panels = style.make_axes(3.4, columns=len(shown), sharey=True, squeeze=False)
    for axes, (sweep, points) in zip(panels[0], shown.items(), strict=True):
        _draw_sweep(axes, sweep, points, single, published)
    panels[0][0].set_ylabel("samples/s, DeepSpeed over Megatron")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    used = [*single, *(p for points in shown.values() for p in points)]
    rounds = "/".join(map(str, sorted({p.record.rounds for p in used})))
    caption = (
        "Scaled-down twins of published runs on emulated slow links, in turn with their baselines; lines and band: "
        f"95 % intervals of {rounds} rounds. Curves: the time model for published runs and twins, without measurements."
    )
    missing = len(shown) < len(SWEEPS) or not single
    return BANDWIDTHS.drawn(figure, caption, (p.record.label for p in used), missing=missing)


def _twin_comparisons(
    records: Sequence[Record], comparisons: Sequence[ComparisonRecord]
) -> list[_TwinComparison]:
    """Return the newest comparison of each pair of scaled-down experiments, for every suite that contains the pair."""
    twins: dict[str, dict[str, TwinOf]] = {}
    for record in records:
        if record.experiment.twin is not None and record.outcome == "ok":
            twins.setdefault(record.key, {})[record.suite] = record.experiment.twin
    newest: dict[tuple[str, str, str], _TwinComparison] = {}
    for c in sorted(comparisons, key=lambda c: c.order):
        for suite, twin in twins.get(c.subject.key, {}).items():
            if TWIN_RATIO in twin.numbers:
                newest[suite, c.baseline.key, c.subject.key] = _TwinComparison(suite, twin, c)
    return list(newest.values())


def _draw_sweep(
    axes: Axes,
    sweep: str,
    points: Sequence[_TwinComparison],
    single: Sequence[_TwinComparison],
    published: float | None,
) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    link, label = SWEEPS[sweep]

    def link_rate(point: _TwinComparison) -> float:
        return float(getattr(point.twin, link)) / GB

    points = sorted(points, key=link_rate)
    rates = [link_rate(p) for p in points]
    originals, twins = zip(*(p.predicted for p in points), strict=True)
    axes.plot(rates, originals, color=style.MUTED, lw=1.2, ls="--", label="predicted, originals")
    axes.plot(rates, twins, color=style.ORANGE, lw=1.4, label="predicted, twins")
    ends = [(x, p.record.low, p.record.high) for x, p in zip(rates, points, strict=True)]
    known = [(x, low, high) for x, low, high in ends if low is not None and high is not None]
    if known:
        x, low, high = zip(*known, strict=True)
        axes.fill_between(x, low, high, color=style.BLUE, alpha=0.18, lw=0)
        axes.vlines(x, low, high, color=style.BLUE, lw=1.2)
    ratios = [p.record.ratio for p in points]
    axes.plot(rates, ratios, color=style.BLUE, marker="o", ms=5, lw=1.2, label="measured, twins")
    for p in single:
        kw: dict[str, Any] = {"marker": "D", "ms": 6, "color": style.BLUE, "mec": style.INK, "ls": "none"}
        axes.plot(link_rate(p), p.record.ratio, label="a larger twin", **kw)
    if published is not None:
        axes.axhline(published, color=style.INK, lw=0.8, ls=":")
        if link == "between" and single:
            star: dict[str, Any] = {"marker": "*", "ms": 11, "color": style.INK, "ls": "none"}
            axes.plot(link_rate(single[0]), published, label="published", **star)
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.08 * max(axes.get_ylim()[1], published or 0.0))
    style.set_grid(axes, "y")
