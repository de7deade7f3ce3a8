"""ZeRO's Figure 1: model states of 7.5B on 64 GPUs by stage, stacked by part, beside the published totals."""

from __future__ import annotations

from repro.report.figures.measured_states import LOOK, PARTS
from repro.report.figures.style import CATEGORY, INK, STAGE, Drawing, Record, canvas, quiet, stacked
from repro.report.figures.values import Value, View
from repro.results.schema import SIMULATED
from repro.util import units

ID, TITLE = "zero-fig1", "ZeRO, Figure 1: model states of 7.5B on 64 GPUs"
ROWS = "zero-fig1-7p5b/*"
RUN = "repro run suites/zero_memory.toml --evidence simulated --only '7.5b-z*-n64'"


def draw(view: View, simulated: list[Record]) -> Drawing:
    """Bars: bytes of the simulated step by part.  Outline: published.  Diamond: the formula."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    values = view.matching(ROWS)
    records = {record.at: record for record in simulated}
    figure, axes = canvas(3.6)
    drawn: list[str] = []
    for y, value in enumerate(values):
        printed, ours, formula = value.published, value.of(SIMULATED), value.of("analytic")
        assert printed is not None
        record = records.get(ours.runs[0]) if ours else None
        if record:
            drawn.append(record.at)
            sizes = {part: record.metrics[f"memory.{part}_bytes"] / units.GB for part in PARTS}
            stacked(axes, y, sizes, LOOK, 0.56, across=True)
        axes.barh(y, printed.value, 0.74, facecolor="none", edgecolor=INK, lw=1.3, zorder=3)
        if formula:
            axes.scatter(formula.value, y, s=30, marker="D", color=INK, edgecolors="white", lw=0.8, zorder=4)
        end = max([printed.value, *(found.value for found in value.ours)])
        axes.annotate(_words(value), (end, y), (9, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(values)), [f"{STAGE[stage]}" for stage in range(len(values))])
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(0, 1.5 * max(value.published.high for value in values if value.published))
    axes.set_xlabel("GB per GPU")
    quiet(axes, "x")
    handles = [Patch(facecolor=CATEGORY[part], label=f"{part}, simulated") for part in PARTS] if drawn else []
    handles.append(Patch(facecolor="none", edgecolor=INK, label="published"))
    diamond = Line2D(
        [], [], marker="D", color=INK, linestyle="none", markersize=5, label="formula (analytic)"
    )
    figure.legend(handles=[*handles, diamond], loc="outside upper center", ncols=5)
    caption = (
        "Bytes of model states on one GPU, Ψ = 7.5e9, Nd = 64, K = 12. Bars are counted on the tensors of the real "
        "step, run on shapes; the formulas are those of sections 5.1 to 5.3. Claim: zero-fig1-7p5b."
    )
    missing = RUN if len(drawn) < len(values) else ""
    return Drawing(ID, TITLE, caption, tuple(drawn), missing, figure, SIMULATED)


def _words(value: Value) -> str:
    parts = [f"published {value.published.text if value.published else ''}"]
    for kind, digits in ((SIMULATED, 4), ("analytic", 4)):
        found = value.of(kind)
        parts.append(f"{kind} {found.value:.{digits}g}" if found else f"{kind}: not run")
    return ", ".join(parts)
