"""Values of a figure from the judged ledger: published values and the values of each kind of evidence.

A figure names rows of the ledger as `claim/label`. A `*` in the label stands for the places on the axis. A value that a
source draws but does not print has no row. Such a place names an expression over simulated records, in the ledger's own
language.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from repro.accuracy.validate.published import TIMED
from repro.claims.evidence import run_command
from repro.claims.expression import ExpressionError, evaluate_expression, parse
from repro.claims.formulas import CONSTANTS, FORMULAS
from repro.claims.judge import experiments_read
from repro.claims.ledger import PUBLISHED_SCALE
from repro.claims.published import UNITS, PrintedNumber
from repro.claims.records import Missing, Records
from repro.claims.verdicts import BAD, GOOD, POSSIBLE, ClaimResult, Finding, RowResult
from repro.config.errors import ConfigError
from repro.report.figures.style import Record
from repro.results.schema import SIMULATED
from repro.simulate.time.calibration import basis_of_record, weakest_basis

_CHOOSE = {"largest", "smallest"}


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Value of one kind of evidence, in the row's unit."""

    kind: str
    """`analytic`, `simulated` or `measured`; measured at the published scale only."""
    value: float
    low: float
    high: float
    agrees: bool | None = None
    """Whether the judge accepts the value; None if it calibrates the time model, is `possible` or is not judged."""
    runs: tuple[str, ...]
    """`suite/name` of the records that give the value."""
    fits: bool
    """Whether all simulated runs of the value fit their devices."""
    possible: bool = False
    """Whether the prediction misses and the published value lies inside the interval from unknown inputs."""
    rests_on: str = ""
    """Basis of a predicted time or rate, one of `repro.simulate.time.calibration.BASES`; else empty."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """Value of one series at one place on the axis."""

    at: str
    published: PrintedNumber | None
    """Published number; None where the source prints no number."""
    error: float
    """Digitisation error of the published value; 0 without digitisation."""
    metric: str
    """Class of tolerance."""
    unit: str
    ours: tuple[Ours, ...]
    """Values of the kinds of evidence: measured, then simulated, then analytic."""
    remedy: tuple[str, ...]
    """Commands that create the missing simulated records."""

    def of_kind(self, kind: str) -> Ours | None:
        """Return the value of this kind of evidence, or None."""
        return next((ours for ours in self.ours if ours.kind == kind), None)

    @property
    def predicted(self) -> Ours | None:
        """The measured value at the published scale, else the simulated value."""
        return self.of_kind("measured") or self.of_kind(SIMULATED)


class View:
    """View of the judged ledger and the simulated records for figures."""

    def __init__(self, judged: Iterable[ClaimResult], simulated: Sequence[Record]):
        self._rows = {f"{r.claim.id}/{row.row.label}": row for r in judged for row in r.rows}
        self._oom = {r.label for r in simulated if r.outcome == "oom"}
        self._bases = {r.label: basis_of_record(r) for r in simulated}
        self._functions = {**FORMULAS, **Records(simulated).functions(SIMULATED)}

    def row(self, reference: str) -> RowResult:
        """Return the row `claim/label`. Raises `ConfigError` if the ledger has no such row."""
        if reference not in self._rows:
            raise ConfigError("row", reference, "claim/label of a row of the ledger")
        return self._rows[reference]

    def matching(self, pattern: str) -> list[Value]:
        """Return a value for each row that `pattern` matches, in the ledger's order; the match of `*` is its place."""
        before, _, after = pattern.partition("*")
        found = [
            (name[len(before) : len(name) - len(after)], row)
            for name, row in self._rows.items()
            if name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
        ]
        if not found:
            raise ConfigError("rows", pattern, "claim/label of rows of the ledger, with a *")
        return [self._value(at, row) for at, row in found]

    def value(self, at: str, reference: str) -> Value:
        """Return the value of one row, placed `at`."""
        return self._value(at, self.row(reference))

    def unpublished(self, at: str, expression: str, unit: str) -> Value:
        """Return the value of an expression over simulated records, for a place without a published number."""
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
        """Return the value to draw for a finding; None if it is not at the published scale or tests the source against
        itself.
        """
        value = finding.value
        if not isinstance(value, int | float) or finding.expected is not None:
            return None
        if finding.kind == "measured" and finding.scale != PUBLISHED_SCALE:
            return None
        if finding.kind == "analytic" and finding.itself:
            return None
        is_simulated, runs = finding.kind == SIMULATED, finding.experiments
        is_search = bool(parse(finding.expression).calls & _CHOOSE)  # in which some runs do not fit
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
