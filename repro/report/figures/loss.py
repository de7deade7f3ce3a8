"""Loss under every strategy of the parity group, and its distance from one process."""

from __future__ import annotations

from typing import Any

from repro.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    Drawing,
    Record,
    canvas,
    dp,
    quiet,
    succeeded,
    zero,
)
from repro.results.curves import distances

PREFIX, SINGLE = "parity-", "parity-single"
TITLE = "Loss under every strategy, against one process"
RUN = "repro run suites/smoke.toml --only 'parity-*'"
TOLERANCE = 1e-5
FLOOR = 1e-9
"""Where a difference of exactly zero is drawn on the log axis; fp32 losses near 5 cannot differ by less."""


def draw(records: list[Record]) -> Drawing:
    """Left: the curves, one over the other.  Right: relative difference at every step, a line a strategy."""
    shown = [r for r in succeeded(records, PREFIX) if r.series.loss]
    single = next((r for r in shown if r.name == SINGLE), None)
    if single is None:
        missing = (
            f"No record of {SINGLE}, which the others are compared with."
            if shown
            else "No record of parity-*."
        )
        return Drawing("loss", TITLE, missing, (), RUN)
    others = sorted((r for r in shown if r is not single), key=lambda r: (_order(_kind(r)), zero(r), r.name))
    reference = single.series.loss or []

    rows = max(3.2, 1.1 + 0.24 * len(others))
    figure, (left, right) = canvas(rows, 1, 2, width_ratios=(1, 1.35))
    named: dict[str, Any] = {}
    for record in [single, *others]:
        kind = _kind(record)
        seen = [(step, loss) for step, loss in enumerate(record.series.loss or (), 1) if loss is not None]
        steps, losses = [step for step, _ in seen], [loss for _, loss in seen]
        (line,) = left.plot(steps, losses, color=COLOURS[kind], linestyle=DASHES[kind], linewidth=1.6)
        named.setdefault(kind, line)
    left.legend(named.values(), named.keys(), loc="upper right")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set_xlabel("optimizer step")
    left.set_ylabel("loss (nats per token)")
    left.set_title("loss curves, overlaid")
    quiet(left, "y")

    for y, record in enumerate(others):
        drawn = [max(d, FLOOR) for d in distances(record.series.loss or [], reference)]
        colour = COLOURS[_kind(record)]
        right.scatter(drawn, [y] * len(drawn), s=14, color=colour, alpha=0.35, linewidths=0)
        if drawn:
            right.scatter(max(drawn), y, s=34, color=colour, edgecolors=INK, linewidths=0.8, zorder=3)
    right.axvline(TOLERANCE, color=INK, linewidth=1.2, linestyle="--")
    right.text(TOLERANCE * 1.25, -0.55, "tolerance", ha="left", va="bottom", fontsize=8)
    right.set_xscale("log")
    right.set_xlim(FLOOR * 0.6, max(1e-3, *right.get_xlim()) if others else 1e-3)
    right.set_xticks([FLOOR, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    right.set_xticklabels(["equal", "1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3"])
    right.minorticks_off()
    right.set_yticks(range(len(others)), [r.name.removeprefix(PREFIX) for r in others])
    right.set_ylim(len(others) - 0.4, -0.9)
    right.set_xlabel("relative difference to one process, every step")
    right.set_title("distance from one process (largest outlined)")
    quiet(right, "x")

    differences = [d for r in others for d in distances(r.series.loss or [], reference)]
    absent = sum(loss is None for r in [single, *others] for loss in r.series.loss or ())
    caption = (
        f"Loss of {single.experiment.model.name} from the same seed, text and global batch over "
        f"{len(reference)} steps: {len(others)} strategies against one process. Largest relative difference at any "
        f"step: {max(differences, default=0):.1e} (tolerance {TOLERANCE:.0e} in fp32)."
    )
    if absent:
        caption += f" {absent} loss values were NaN and are not drawn."
    return Drawing(
        "loss", TITLE, caption, tuple(r.at for r in [single, *others]), "" if others else RUN, figure
    )


COLOURS = {
    "one process": INK,
    "ZeRO 0-3": BLUE,
    "tensor parallel": ORANGE,
    "tensor x ZeRO": GREEN,
    "recomputation": PURPLE,
    "other": GREY,
}
"""By kind, in the order of the lines."""
DASHES = {
    "one process": "-",
    "ZeRO 0-3": (0, (4, 1.5)),
    "tensor parallel": (0, (1, 1)),
    "tensor x ZeRO": (0, (3, 1.25, 1.5, 1.25)),
    "recomputation": (0, (5, 1, 1, 1)),
    "other": (0, (3, 1.25, 1.25, 1.25, 1.25, 1.25)),
}
"""Curves that lie on each other are told apart by what shows between the dashes."""


def _kind(record: Record) -> str:
    layout = record.experiment.layout
    if record.name == SINGLE:
        return "one process"
    if layout.recompute:
        return "recomputation"
    if layout.tp > 1:
        return "tensor x ZeRO" if dp(record) > 1 else "tensor parallel"
    return "ZeRO 0-3" if dp(record) > 1 else "other"


def _order(kind: str) -> int:
    return list(COLOURS).index(kind)
