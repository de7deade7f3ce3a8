"""Loss over the steps of any results, a panel for each model and kind of evidence."""

from __future__ import annotations

from collections.abc import Sequence

from repro.report.figures.style import Drawing, Record, canvas, quiet

TITLE = "Loss over the steps"
NAMED = 12
"""Lines of a panel that are named beside it; more could not be told apart."""
DASHES = ((4, 0), (4, 2), (2, 2), (1, 3))
"""Curves that lie on each other show between each other's dashes."""


def draw(records: Sequence[Record]) -> Drawing:
    """A line a record that has a loss of two steps or more."""
    import seaborn

    panels: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if len(record.series.loss or ()) > 1:
            key = record.suite, record.experiment.model.name, record.shown_as
            panels.setdefault(key, []).append(record)
    if not panels:
        return Drawing("curves", TITLE, "none of them trained for two steps.", (), "")
    figure, grid = canvas(0.4 + 2.6 * len(panels), len(panels), 1, squeeze=False)
    for axes, ((suite, model, kind), shown) in zip(grid[:, 0], panels.items(), strict=True):
        colours = seaborn.husl_palette(len(shown), l=0.5)
        for i, (record, colour) in enumerate(zip(shown, colours, strict=True)):
            seen = [(step, loss) for step, loss in enumerate(record.series.loss or (), 1) if loss is not None]
            axes.plot(
                *zip(*seen, strict=True), color=colour, dashes=DASHES[i % len(DASHES)], label=record.name
            )
        if len(shown) <= NAMED:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("loss (nats per token)")
        axes.set_title(f"{suite}: {model}, {kind}" + f", {len(shown)} curves" * (len(shown) > NAMED))
        quiet(axes, "y")
    grid[-1, 0].set_xlabel("optimizer step")
    drawn = tuple(record.at for shown in panels.values() for record in shown)
    return Drawing("curves", TITLE, f"Loss of {len(drawn)} results.", drawn, "", figure)
