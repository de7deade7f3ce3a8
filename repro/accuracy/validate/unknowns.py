"""Which numbers of systems and of software would settle most predicted rows, if somebody measured them.

A row of the ledger whose predicted time is not certain is moved by several unknowns, one at a time (`Doubt.alone`).
One that carries more than half of all these moves *settles* the row: measured, it leaves less than half of the width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro.accuracy.validate.measurable import Measurement, measurement
from repro.claims.verdicts import ClaimResult, Finding, RowResult
from repro.config import OperatorSet
from repro.config.words import count_noun
from repro.measure.local_system import load_system
from repro.results.interval import Sensitivity
from repro.results.schema import ExperimentRecord, Record
from repro.results.select import select
from repro.simulate.time.calibration import calibration_point_of, calibration_points, uncertain_numbers

SHOWN = 5
SETTLES = 0.5
"""Part of a row's moves."""


@dataclass
class Input:
    """One unknown and what hangs on it."""

    key: str
    """`links.inter-node.rings`, as the file of the system has it; `NAME: FLOP/s` of a generation's published point."""
    system: str
    """Whose number it is; of a generation the system that its point was measured on."""
    low: float
    best: float
    high: float
    source: str
    rows: list[str] = field(default_factory=list)
    """`claim/label` of those that it moves."""
    settles: list[str] = field(default_factory=list)
    """Those of which it carries more than half."""
    possible: list[str] = field(default_factory=list)
    """Those that are `possible` and on which it decides, alone or as one of the two that move it most."""
    share: float = 0.0
    """Of the moves of all rows in doubt, each row counted alike; of all inputs together 1."""

    @property
    def measured_by(self) -> Measurement:
        """What would measure it."""
        return measurement(self.key, self.system)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        how = self.measured_by
        return {**vars(self), "command": how.command, "fact": how.fact, "how": how.how}


@dataclass(frozen=True)
class ShoppingList:
    """Every unknown that moves a row."""

    inputs: tuple[Input, ...]
    """The one that settles most rows first."""
    rows: int
    """Rows with a predicted time that is not certain."""
    possible: int
    """Those of them whose verdict rests on what is not known."""

    @property
    def settled_by_the_first(self) -> int:
        """Rows that the inputs which are shown settle."""
        return len({row for one in self.inputs[:SHOWN] for row in one.settles})

    @property
    def words(self) -> str:
        """What the list says, in a sentence."""
        return (
            f"Unknown numbers leave the predicted times of {count_noun(self.rows, 'row')} in doubt. A number settles a "
            f"row if it carries more than half of what all of them move it, one at a time; the first {SHOWN} settle "
            f"{self.settled_by_the_first}. Verdicts that are possible as far as they are known: {self.possible}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        inputs = [one.as_dict() for one in self.inputs]
        return {"rows": self.rows, "possible": self.possible, "unknowns": inputs}


def known_as(one: Input) -> str:
    """`1 [1, 8]`."""
    return f"{one.best:.4g} [{one.low:.4g}, {one.high:.4g}]"


def by_claim(rows: Sequence[str]) -> str:
    """Rows by their claim: `zero-fig2-throughput (12), ds-64gpu-table`."""
    counts = Counter(row.partition("/")[0] for row in rows)
    return ", ".join(f"{claim} ({count})" if count > 1 else claim for claim, count in counts.items())


def shopping_list(judged: Iterable[ClaimResult], records: Iterable[Record]) -> ShoppingList:
    """What the rows of `judged`, predicted by simulated `records`, need to be known."""
    seen = simulated(records)
    found: dict[tuple[str, str], Input] = {}
    rows: list[tuple[str, Finding]] = [(name(result, row), one) for result, row, one in in_doubt(judged)]
    for row, finding in rows:
        assert finding.doubt is not None
        for key, share in finding.doubt.shares.items():
            for one in _inputs(key, finding, seen, found):
                one.rows.append(row)
                one.share += share / len(rows)
                if share > SETTLES:
                    one.settles.append(row)
                if key in finding.deciding:
                    one.possible.append(row)
    ordered = sorted(found.values(), key=lambda one: (-len(one.settles), -one.share))
    return ShoppingList(tuple(ordered), len(rows), sum(bool(finding.deciding) for _, finding in rows))


def in_doubt(judged: Iterable[ClaimResult]) -> Iterator[tuple[ClaimResult, RowResult, Finding]]:
    """Every row whose predicted time is not certain, with its prediction."""
    for result in judged:
        for row in result.rows:
            finding = next((one for one in row.findings if one.doubt is not None), None)
            if finding is not None:
                yield result, row, finding


def name(result: ClaimResult, row: RowResult) -> str:
    """`claim/label`."""
    return f"{result.claim.id}/{row.row.label}"


def simulated(records: Iterable[Record]) -> dict[str, ExperimentRecord]:
    """The simulated records that count, by `suite/name`."""
    return {record.at: record for record in select(records).simulated if record.conclusive}


def _inputs(
    key: str, finding: Finding, seen: Mapping[str, ExperimentRecord], found: dict[tuple[str, str], Input]
) -> Sequence[Input]:
    """The unknown `key` of the systems that a prediction reads: one, but where it compares two machines."""
    inputs: dict[str, Input] = {}
    for record in (seen[run] for run in finding.experiments):
        move = next((one for one in _moves(record) if one.key == key), None)
        if move is None:
            continue
        system = record.experiment.system
        whose = _POINTS[key].system if key in _POINTS else system
        if (key, whose) not in found:
            source = _sources(system, record.experiment.layout.kernels).get(key, "")
            found[key, whose] = Input(key, whose, move.low, move.best, move.high, source)
        inputs[whose] = found[key, whose]
    return list(inputs.values())


def _moves(record: ExperimentRecord) -> list[Sensitivity]:
    return record.interval.moves if record.interval is not None else []


def _sources(name: str, kernels: OperatorSet) -> dict[str, str]:
    system = load_system(name)
    return {one.key: one.source for one in uncertain_numbers(system, calibration_point_of(kernels, system))}


_POINTS = {one.key: point for point in calibration_points() for one in point.unknowns}
