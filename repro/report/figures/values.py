"""Published values and our values (simulated, measured, analytic) for figures, and their bars and marks.

A figure names published values as `claim/label`, in which a `*` matches the label on the axis. Published bars are
solid, simulated hatched, measured dotted, and missing dashed; analytic values are diamonds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.accuracy.validate.published import TIMED
from repro.claims.evidence import run_command
from repro.claims.expression import ExpressionError, evaluate_expression, parse
from repro.claims.formulas import CONSTANTS, FORMULAS
from repro.claims.judge import experiments_read
from repro.claims.ledger import ITSELF, PUBLISHED_SCALE
from repro.claims.published import UNITS, PrintedNumber
from repro.claims.records import Missing, Records
from repro.claims.verdicts import BAD, GOOD, POSSIBLE, ClaimResult, Finding, RowResult
from repro.config.errors import ConfigError, require
from repro.report.figures.style import GREY, INK, MUTED, VERMILION, Record, write_near
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import basis_of_record, weakest_basis

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CHOOSE = {"largest", "smallest"}


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Value that this package computes, simulates or measures to reproduce a published value, in the published unit."""

    kind: str
    """Kind of evidence: `analytic`, `simulated`, or `measured` at the published scale."""
    value: float
    low: float
    high: float
    agrees: bool | None = None
    """Whether our value agrees with the published one; None if the verdict says neither, such as `possible`."""
    runs: tuple[str, ...]
    """Names `suite/name` of the experiment records from which our value is computed."""
    fits: bool
    """Whether all simulated steps from which our value is computed fit in device memory."""
    possible: bool = False
    """Whether the prediction misses and the published value lies inside the interval from uncertain inputs."""
    rests_on: str = ""
    """Least reliable calibration behind a predicted time or rate, a key of `BASES`; empty for other values."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """Published value of a data series at one label of a figure's axis, and our values for it."""

    at: str
    published: PrintedNumber | None
    """Published number; None where the source prints no number."""
    error: float
    """Digitisation error of the published value; 0 without digitisation."""
    metric: str
    """Name of the tolerance that applies to the published value, a key of `RELATIVE_TOLERANCE`."""
    unit: str
    ours: tuple[Ours, ...]
    """Our values for the published value, at most one per kind of evidence: measured, then simulated, then analytic."""
    remedy: tuple[str, ...]
    """Commands that create the simulated records that are missing for the published value."""

    def of_kind(self, kind: str) -> Ours | None:
        """Return the value that evidence of the given kind, such as `simulated`, gives for a claim; None without it."""
        return next((ours for ours in self.ours if ours.kind == kind), None)

    @property
    def predicted(self) -> Ours | None:
        """Our value to compare with the published one: measured at the published scale, else simulated, else None."""
        return self.of_kind("measured") or self.of_kind(SIMULATED)


class View:
    """Access to published values and their evidence by `claim/label`, and to simulated records, for figures."""

    def __init__(self, judged: Iterable[ClaimResult], simulated: Sequence[Record]):
        self._rows = {f"{r.claim.id}/{row.row.label}": row for r in judged for row in r.rows}
        self._oom = {r.label for r in simulated if r.outcome == "oom"}
        self._bases = {r.label: basis_of_record(r) for r in simulated}
        self._functions = {**FORMULAS, **Records(simulated).functions(SIMULATED)}

    def row(self, reference: str) -> RowResult:
        """Return the published value `claim/label` with its evidence. Raises `ConfigError` for an unknown value."""
        require(reference in self._rows, "row", reference, "CLAIM/LABEL of a published value in repro/claims")
        return self._rows[reference]

    def matching(self, pattern: str) -> list[Value]:
        """Return each published value `claim/label` that `pattern` matches; its axis label is the match of `*`."""
        before, _, after = pattern.partition("*")
        found = [
            (name[len(before) : len(name) - len(after)], row)
            for name, row in self._rows.items()
            if name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
        ]
        require(found, "rows", pattern, "CLAIM/LABEL, with a *, of published values in repro/claims")
        return [self._value(at, row) for at, row in found]

    def value(self, at: str, reference: str) -> Value:
        """Return the published value `reference` (`claim/label`) and our values, for the axis label `at`."""
        return self._value(at, self.row(reference))

    def unpublished(self, at: str, expression: str, unit: str) -> Value:
        """Return the result of `expression` over simulated records, for an axis label without a published number."""
        parsed = parse(expression)
        ours: tuple[Ours, ...] = ()
        remedy: tuple[str, ...] = ()
        try:
            result = evaluate_expression(parsed, self._functions, CONSTANTS)
        except Missing as missing:
            remedy = (run_command(missing.suite, SIMULATED),)
        except ExpressionError as error:
            raise ConfigError("more", expression, says=str(error)) from None
        else:
            value, low, high = (float(v) / UNITS[unit] for v in (result.value, result.low, result.high))
            runs = tuple(experiments_read(parsed, {}))
            basis = self._rests_on(expression, runs)
            found = Ours(
                kind=SIMULATED,
                value=value,
                low=low,
                high=high,
                runs=runs,
                fits=self._fit(runs),
                rests_on=basis,
            )
            ours = (found,)
        return Value(at=at, published=None, error=0.0, metric="", unit=unit, ours=ours, remedy=remedy)

    def _value(self, at: str, result: RowResult) -> Value:
        row = result.row
        shown = [found for found in (self._ours(finding, result) for finding in result.findings) if found]
        first = {ours.kind: ours for ours in reversed(shown)}
        lacking = [f for f in result.findings if f.kind == SIMULATED and f.value is None]
        suites = [name.partition("/")[0] for finding in lacking for name in finding.experiments]
        return Value(
            at=at,
            published=row.printed,
            error=row.error,
            metric=row.metric,
            unit=row.unit,
            ours=tuple(first[kind] for kind in ("measured", SIMULATED, "analytic") if kind in first),
            remedy=tuple(dict.fromkeys(run_command(suite, SIMULATED) for suite in suites)),
        )

    def _ours(self, finding: Finding, result: RowResult) -> Ours | None:
        """Return our value to draw; None if measured at another scale, or if computed from the report's own numbers."""
        value = finding.value
        if not isinstance(value, int | float) or finding.expected is not None:
            return None
        if finding.kind == "measured" and finding.scale != PUBLISHED_SCALE:
            return None
        if finding.origin == ITSELF:
            return None
        is_simulated, runs = finding.kind == SIMULATED, finding.experiments
        # `largest` and `smallest` also read experiments that do not fit in memory, but the value that they return fits.
        is_search = bool(parse(finding.expression).calls & _CHOOSE)
        return Ours(
            kind=finding.kind,
            value=float(value),
            low=float(value if finding.low is None else finding.low),
            high=float(value if finding.high is None else finding.high),
            agrees=finding.verdict in GOOD if finding.verdict in (*GOOD, *BAD) else None,
            runs=runs,
            possible=finding.verdict == POSSIBLE,
            fits=not is_simulated or is_search or self._fit(runs),
            rests_on=self._rests_on(finding.expression, runs) if is_simulated else "",
        )

    def _rests_on(self, expression: str, runs: Sequence[str]) -> str:
        timed = any(name in expression for name in TIMED)
        return weakest_basis(self._bases.get(run, "") for run in runs) if timed else ""

    def _fit(self, runs: Sequence[str]) -> bool:
        return not any(run in self._oom for run in runs)


KIND_HATCHES = {SIMULATED: "//////", "measured": "....."}
PLACE_WIDTH = 0.84
"""Total width of all bars at one label of the horizontal axis, whose labels have distance 1."""


class BarPair(NamedTuple):
    """Horizontal position of adjacent bars, a published value and our value: their common centre and total width."""

    middle: float
    width: float


def bar_pair(place: int, series: float, count: int) -> BarPair:
    """Return the position of the bars of data series number `series`, out of `count`, at axis position `place`."""
    width = PLACE_WIDTH / count
    return BarPair(place - PLACE_WIDTH / 2 + (series + 0.5) * width, width * 0.94)


def draw_bars(axes: Axes, at: BarPair, value: Value, colour: str, size: float) -> None:
    """Draw the bar of a published value, and to its right that of our value, or a dashed outline without a record."""
    half = at.width / 2
    left, right = at.middle - half / 2, at.middle + half / 2
    printed, ours = value.published, value.predicted
    if printed:
        axes.bar(left, printed.value / size, half, color=colour, lw=0, zorder=2)
        spread = max(value.error, (printed.high - printed.low) / 2) / size
        if spread:
            axes.errorbar(left, printed.value / size, spread, color=INK, lw=0.9, capsize=1.5, zorder=4)
    else:
        write_near(axes, "?", (left, 0), (0, 2), ha="center", color=MUTED, fontsize=8)
    if ours:
        hatch = KIND_HATCHES[ours.kind]
        axes.bar(right, ours.value / size, half, zorder=2, fc="white", ec=colour, hatch=hatch, lw=0.9)
        _draw_interval_and_misfit(axes, right, ours, size)
    elif printed and not value.of_kind("analytic"):
        dashes = (0, (3, 2))
        axes.bar(right, printed.value / size, half, zorder=1, fc="none", ec=GREY, lw=0.9, ls=dashes)
    weaker = value.of_kind(SIMULATED)
    if weaker and weaker is not ours:
        axes.scatter(right, weaker.value / size, s=24, c="white", marker="s", ec=INK, lw=1.1, zorder=5)
    analytic = value.of_kind("analytic")
    if analytic:
        axes.scatter(right, analytic.value / size, s=26, marker="D", c=INK, lw=0, zorder=5)


def draw_error(axes: Axes, at: BarPair, value: Value, colour: str, far: float) -> float:
    """Draw the relative error of our value as a labelled stem, and return its height; 0 if a value is missing."""
    ours, printed = value.predicted, value.published
    if printed is None:
        return 0.0
    if ours is None:
        axes.annotate("no\nrecord", (at.middle, 0), ha="center", va="center", color=MUTED, fontsize=6.5)
        return 0.0
    off = ours.value / printed.value - 1
    shown = max(-far, min(far, off))
    calibrates = ours.agrees is None and not ours.possible
    axes.plot([at.middle, at.middle], [0, shown], color=GREY if calibrates else colour, lw=1.6, zorder=2)
    if ours.high > ours.low:
        ends = [max(-far, min(far, end / printed.value - 1)) for end in (ours.low, ours.high)]
        axes.plot([at.middle, at.middle], ends, color=INK, lw=5, alpha=0.18, solid_capstyle="butt", zorder=1)
    face = colour if ours.agrees else "white"
    edge = GREY if calibrates else colour
    axes.scatter(at.middle, shown, s=26, facecolor=face, edgecolor=edge, lw=1.4, zorder=3)
    percent = f"{off:+.0%}".replace("-", "−").replace("−0%", "0%").replace("+0%", "0%")
    words = ("cal." if calibrates else percent) + "?" * ours.possible
    offset, side = ((0, 4), "bottom") if shown >= 0 else ((0, -4), "top")
    kw: dict[str, Any] = {"ha": "center", "va": side, "fontsize": 6.5}
    write_near(axes, words, (at.middle, shown), offset, color=MUTED if ours.agrees else INK, **kw)
    return shown


def draw_legend(figure: Figure, colours: dict[str, str], values: Sequence[Value]) -> None:
    """Draw the legend of a redrawn figure: colours of the data series, and fills and marks that the figure contains."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def mark(sign: str, label: str, **kw: Any) -> None:
        handles.append(Line2D([], [], marker=sign, linestyle="none", label=label, **kw))

    handles: list[Artist] = []
    if len(colours) > 1:
        handles += [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    if any(value.published for value in values):
        handles.append(Patch(facecolor=MUTED, label="published"))
    kinds = {value.predicted.kind for value in values if value.predicted}
    handles += [
        Patch(facecolor="white", edgecolor=MUTED, hatch=KIND_HATCHES[kind], label=kind)
        for kind in ("measured", SIMULATED)
        if kind in kinds
    ]
    if any(value.predicted is not value.of_kind(SIMULATED) and value.of_kind(SIMULATED) for value in values):
        mark("s", "simulated (also measured)", color=INK, mfc="white", markersize=5)
    if any(value.of_kind("analytic") for value in values):
        mark("D", "analytic", color=INK, markersize=5)
    if any(value.published and not value.ours for value in values):
        handles.append(Patch(facecolor="none", edgecolor=GREY, linestyle="--", label="not run"))
    if any(value.published is None for value in values):
        mark("$?$", "not printed", color=MUTED, markersize=6)
    if any(ours.kind == SIMULATED and not ours.fits for value in values for ours in value.ours):
        mark("x", "does not fit, simulated", color=VERMILION, markersize=6)
    compared = [value.predicted for value in values if value.published and value.predicted]
    if any(ours.possible for ours in compared):
        mark("o", "?: interval contains published value", color=MUTED, mfc="white")
    if any(ours.agrees is None and not ours.possible for ours in compared):
        mark("o", "cal.: used to calibrate, not predicted", color=GREY, mfc="white")
    elif any(ours.agrees is False for ours in compared):
        mark("o", "beyond the tolerance", color=MUTED, mfc="white")
    columns = len(handles) if len(handles) <= 5 else (len(handles) + 1) // 2
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=1.6)


def _draw_interval_and_misfit(axes: Axes, x: float, ours: Ours, size: float) -> None:
    """Draw the uncertainty interval of our value, and a cross if one of its simulated steps does not fit in memory."""
    y = ours.value / size
    if ours.high > ours.low:
        spread = [[(ours.value - ours.low) / size], [(ours.high - ours.value) / size]]
        axes.errorbar(x, y, spread, color=INK, lw=0.9, capsize=1.5, zorder=4)
    if not ours.fits:
        write_near(axes, "×", (x, y), (0, 0), ha="center", va="bottom", color=VERMILION, fontsize=11)
