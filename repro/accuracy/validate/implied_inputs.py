"""Implied values: the value of one uncertain input at which the prediction equals a published value.

All other inputs have their best values. The search covers the input's range and its surroundings, which simulated
records contain as curves (`Sensitivity.curve`). If no value brings two published values within their tolerances, the
sources contradict each other, or the time model is wrong for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from repro.accuracy.validate.published import points
from repro.accuracy.validate.unknowns import row_name, simulated_records, uncertain_rows
from repro.claims.expression import evaluate_expression
from repro.claims.formulas import CONSTANTS, FORMULAS
from repro.claims.published import UNITS
from repro.claims.records import Records
from repro.claims.tolerance import accepted_range_of_row
from repro.claims.verdicts import ClaimResult, Finding, RowResult
from repro.config.words import count_noun
from repro.results.interval import Other, Sensitivity, interpolate_log, log_fraction
from repro.results.schema import SIMULATED, ExperimentRecord, Record

MIN_SHARE = 0.1
"""Minimum share of an input in a prediction's uncertainty for which the input's implied value is computed."""
Curve = Sequence[tuple[float, float]]
"""Pairs (value of an uncertain input, prediction), ordered by value."""


@dataclass(frozen=True)
class RequiredInput:
    """Value and range of an uncertain input at which the prediction agrees with one published value."""

    row: str
    """Published value as `claim/label`."""
    value: float | None
    """Value of the uncertain input at which the prediction equals the published value; None if there is none."""
    low: float | None
    """Smallest value of the input with which the prediction is within its tolerance; None if there is none."""
    high: float | None


@dataclass(frozen=True)
class ImpliedInput:
    """One uncertain input of a system, and the values that published values on this system imply for it."""

    key: str
    system: str
    low: float
    best: float
    high: float
    searched: tuple[float, float]
    needs: tuple[RequiredInput, ...]
    """Input value that each published value requires, in ascending order. Published values that no input value
    reproduces are last."""

    @property
    def contradiction(self) -> tuple[RequiredInput, RequiredInput] | None:
        """Return two published values that require disjoint ranges of the input; None if one input value suits all."""
        served = [need for need in self.needs if need.low is not None]
        if not served:
            return None
        most = max(served, key=lambda need: need.low or 0.0)
        least = min(served, key=lambda need: need.high or 0.0)
        return (most, least) if (most.low or 0.0) > (least.high or 0.0) else None

    @property
    def torn(self) -> int:
        """Return how many published values the best input value misses, without those that every input value misses."""
        ends = ((need.low, need.high) for need in self.needs)
        served = [(low, high) for low, high in ends if low is not None and high is not None]
        most = max((sum(low <= at <= high for low, high in served) for at, _ in served), default=0)
        return len(served) - most

    @property
    def unserved(self) -> tuple[RequiredInput, ...]:
        """Return the published values whose predictions are outside their tolerances at all searched input values."""
        return tuple(need for need in self.needs if need.low is None)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data with the implied input values and the published values that need different input values."""
        against = self.contradiction
        rows = None if against is None else [need.row for need in against]
        return {**vars(self), "needs": [vars(need) for need in self.needs], "contradiction": rows}

    @property
    def words(self) -> str:
        """Return one paragraph on the input values that the published values imply, and on their contradictions."""
        exact = [need.value for need in self.needs if need.value is not None]
        text = count_noun(len(self.needs), "row")
        if exact:
            several = f" need {min(exact):.3g} to {max(exact):.3g}"
            text += several if len(exact) > 1 else f" needs {exact[0]:.3g}"
            text += f" (given {self.low:.4g} to {self.high:.4g})"
        if self.unserved:
            count, rows = len(self.unserved), ", ".join(need.row for need in self.unserved[:3])
            text += f"; no input value from {self.searched[0]:.3g} to {self.searched[1]:.3g} fits "
            text += f"{count_noun(count, 'row')} ({rows}{', ...' * (count > 3)})"
        against = self.contradiction
        served = [need for need in self.needs if need.low is not None and need.high is not None]
        if against is None and served:
            low, high = max(need.low or 0.0 for need in served), min(need.high or 0.0 for need in served)
            text += f"; an input value from {low:.3g} to {high:.3g} fits all {'others' if self.unserved else 'rows'}"
        if against is not None:
            most, least = against
            text += (
                f". No single input fits all other rows: {most.row} needs {most.low:.3g} or more, {least.row} needs "
                f"{least.high:.3g} or less. The sources contradict each other, or the model is wrong for a row"
            )
        return text + "."


def find_implied_inputs(judged: Sequence[ClaimResult], records: Sequence[Record]) -> list[ImpliedInput]:
    """Return the implied values of all uncertain inputs of all systems, by decreasing number of published values."""
    counted = {(point.claim, point.label) for point in points(judged, records) if not point.left_out}
    seen, functions = simulated_records(records), Records(records)
    moves: dict[tuple[str, str], Sensitivity] = {}
    needs: dict[tuple[str, str], list[RequiredInput]] = {}
    for result, row, finding in uncertain_rows(judged):
        if (result.claim.id, row.row.label) not in counted or finding.uncertainty is None:
            continue
        runs = [seen[run] for run in finding.experiments]
        for key, share in finding.uncertainty.shares.items():
            moving = _moving(key, runs)
            if share < MIN_SHARE or not moving:
                continue
            predicted = _predicted(key, row, finding, functions)
            values = sorted({value for move in moving.values() for value, _ in move.curve or ()})
            need = _need(result, row, finding, [(value, predicted(value)) for value in values])
            for system, move in moving.items():
                moves[key, system] = move
                needs.setdefault((key, system), []).append(need)
    found = [_implied(key, system, move, needs[key, system]) for (key, system), move in moves.items()]
    return sorted(found, key=lambda one: -len(one.needs))


def _moving(key: str, runs: Iterable[ExperimentRecord]) -> Mapping[str, Sensitivity]:
    """Return, by system, how the step time of simulated runs depends on the uncertain input `key`."""
    return {
        run.experiment.system: move
        for run in runs
        if run.interval is not None
        for move in run.interval.moves
        if move.key == key and move.curve
    }


def _predicted(key: str, row: RowResult, finding: Finding, records: Records) -> Callable[[float], float]:
    (evidence,) = (e for e in row.row.evidence if e.kind == SIMULATED and e.value.text == finding.expression)
    variables = {**CONSTANTS, **row.row.variables}

    def predict_at(value: float) -> float:
        functions = {**FORMULAS, **records.functions(SIMULATED, Other(key, value))}
        return float(evaluate_expression(evidence.value, functions, variables).value) / UNITS[row.row.unit]

    return predict_at


def _need(result: ClaimResult, row: RowResult, finding: Finding, curve: Curve) -> RequiredInput:
    assert row.row.printed is not None
    (evidence,) = (e for e in row.row.evidence if e.kind == SIMULATED and e.value.text == finding.expression)
    rule = accepted_range_of_row(row.row, evidence, result.claim)
    assert rule is not None
    exact = _crossing(curve, row.row.printed.value)
    edges = [_crossing(curve, edge) for edge in (rule.low, rule.high)]
    served = [value for value, predicted in curve if rule.meets(predicted, predicted)]
    served += [edge for edge in edges if edge is not None]
    ends = (min(served), max(served)) if served else (None, None)
    return RequiredInput(row_name(result, row), exact, *ends)


def _crossing(curve: Curve, target: float) -> float | None:
    """Return the smallest input value at which `curve` predicts `target`, by log-log interpolation; else None."""
    for (left, low), (right, high) in pairwise(curve):
        if min(low, high) <= target <= max(low, high) and low != high:
            return interpolate_log(left, right, log_fraction(target, low, high))
    return None


def _implied(key: str, system: str, move: Sensitivity, needs: list[RequiredInput]) -> ImpliedInput:
    values = [value for value, _ in move.curve or ()]
    ordered = sorted(needs, key=lambda need: (need.value is None, need.value or 0.0))
    return ImpliedInput(key, system, move.low, move.best, move.high, (values[0], values[-1]), tuple(ordered))
