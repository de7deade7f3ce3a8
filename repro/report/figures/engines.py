"""Step time, memory and messages by engine and strategy: ours, torch's strategies, DeepSpeed and Megatron-core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from repro.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    STAGE,
    Drawing,
    Record,
    canvas,
    quiet,
    zero,
)
from repro.results.schema import ComparisonRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUITE = "engines"
TITLE = "The same step by engine and strategy"
RUN = "repro run suites/engines.toml --only 'speed-*'"
LOOK = {
    "native": ("this suite", BLUE),
    "torch": ("torch", ORANGE),
    "deepspeed": ("DeepSpeed", GREEN),
    "megatron": ("Megatron-core", PURPLE),
}

STRATEGIES = (*STAGE.values(), "TP", "PP")


class _Bar(NamedTuple):
    strategy: str
    engine: str
    value: float
    low: float | None = None
    high: float | None = None


def draw(records: list[Record], comparisons: list[ComparisonRecord]) -> Drawing:
    """Bars over strategies, one colour an engine; times over ours with the interval of their comparison."""
    shown = {
        r.key: r for r in records if r.suite == SUITE and r.name.startswith("speed-") and r.outcome == "ok"
    }
    turns = [c for c in comparisons if c.baseline.key in shown and c.subject.key in shown]
    if not turns:
        return Drawing("engines", TITLE, "No comparison of engines in the store.", (), RUN)
    members = {key: shown[key] for c in turns for key in (c.baseline.key, c.subject.key)}
    held, sent = [], []
    for record in members.values():
        strategy, name = _strategy(record), record.experiment.engine
        held.append(_Bar(strategy, name, record.metrics["memory.states_bytes"] / 1e6))
        sent.append(_Bar(strategy, name, record.metrics["comm.sent_bytes"] / 1e6))
    times = [_Bar(_strategy(shown[key]), "native", 1.0) for key in {c.baseline.key for c in turns}]
    for c in turns:
        subject = shown[c.subject.key]
        low, high = (1 / end if end else None for end in (c.high, c.low))
        times.append(_Bar(_strategy(subject), subject.experiment.engine, 1 / c.ratio, low, high))

    from matplotlib.patches import Patch

    figure, panels = canvas(6.6, rows=3)
    _grouped(panels[0], times, "seconds a step, ours = 1")
    _grouped(panels[1], held, "MB of model states")
    _grouped(panels[2], sent, "MB that rank 0 sends a step")
    here = [name for name in LOOK if any(r.experiment.engine == name for r in members.values())]
    handles = [Patch(color=LOOK[name][1], label=LOOK[name][0]) for name in here]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(here))

    libraries = {str(r.software["name"]) for r in members.values() if r.software} - {"repro"}
    rounds = "/".join(map(str, sorted({c.rounds for c in turns})))
    caption = (
        f"{_alike(list(members.values()))} The engines took turns in {rounds} rounds; lines on the times are 95 % "
        "intervals. Model states as they lie when the gradients are there, of the fullest rank; messages as a ring "
        f"sends them, of libraries counted from outside. {', '.join(sorted(libraries))}."
    )
    missing = "" if here == list(LOOK) else RUN
    return Drawing("engines", TITLE, caption, tuple(r.at for r in members.values()), missing, figure)


def _grouped(axes: Axes, bars: list[_Bar], label: str) -> None:
    import pandas as pd
    import seaborn as sns

    frame = pd.DataFrame(bars)
    strategies = [name for name in STRATEGIES if name in set(frame["strategy"])]
    engines = [name for name in LOOK if name in set(frame["engine"])]
    sns.barplot(
        frame,
        x="strategy",
        y="value",
        hue="engine",
        order=strategies,
        hue_order=engines,
        palette=[LOOK[name][1] for name in engines],
        saturation=1,
        errorbar=None,
        gap=0.08,
        lw=0,
        ax=axes,
    )
    known = {(bar.strategy, bar.engine): bar for bar in bars}
    for container, engine in zip(axes.containers, engines, strict=False):
        for patch in container:
            middle = patch.get_x() + patch.get_width() / 2
            bar = known[strategies[round(middle)], engine]
            if bar.low and bar.high:
                axes.vlines(middle, bar.low, bar.high, color=INK, lw=1)
            words: dict[str, Any] = {"ha": "center", "fontsize": 7, "textcoords": "offset points"}
            axes.annotate(f"{bar.value:.3g}", (middle, bar.high or bar.value), (0, 4), **words)
    axes.set(xlabel="", ylabel=label)
    axes.margins(y=0.16)
    quiet(axes, "y")
    if (legend := axes.get_legend()) is not None:
        legend.remove()


def _strategy(record: Record) -> str:
    layout = record.experiment.layout
    return "TP" if layout.tp > 1 else "PP" if layout.pp > 1 else STAGE[zero(record)]


def _alike(members: list[Record]) -> str:
    one = members[0].experiment
    return (
        f"{one.model.name}, {one.layout.precision}, {one.layout.world} processes, "
        f"{one.layout.global_batch} samples of {one.seq} tokens a step."
    )
