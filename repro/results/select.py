"""Selection of the records that claims and reruns use, if a store has several records of one experiment.

Records of another measurement protocol never count. Selection by key, for reruns, takes the newest record, so that an
experiment that failed after a success runs again. Selection by name, for claims and figures, takes the newest
conclusive record, or the newest failure if no record is conclusive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from repro.config.experiment import PROTOCOL
from repro.results.schema import (
    MEASURED,
    SIMULATED,
    ComparisonRecord,
    EvaluationRecord,
    ExperimentRecord,
    FitRecord,
    Record,
)


@dataclass(frozen=True)
class Selection:
    """Records that claims and figures use, one for each experiment name (`suite/name`) and kind of evidence."""

    by_name: dict[tuple[str, str], ExperimentRecord]
    """Selected record of each experiment, by (`measured` or `simulated`, `suite/name`)."""
    by_pair: dict[tuple[str, str], ComparisonRecord]
    """Newest comparison of each pair of experiments, by the names (subject, baseline)."""
    evaluations: list[EvaluationRecord]
    """Successful evaluations of model weights, oldest first."""
    fits: list[FitRecord]
    """Searches for the largest model that fits in memory, oldest first."""
    older: int
    """Number of superseded records, which have a selected record of the same experiment in their place."""
    foreign: int
    """Number of records that are ignored because they have another version of the measurement protocol."""

    @property
    def measured(self) -> list[ExperimentRecord]:
        """Return the selected records of measured experiments, one per name."""
        return [record for record in self.by_name.values() if record.evidence != SIMULATED]

    @property
    def simulated(self) -> list[ExperimentRecord]:
        """Return the selected records of simulated experiments, one per name."""
        return [record for record in self.by_name.values() if record.evidence == SIMULATED]

    @property
    def comparisons(self) -> list[ComparisonRecord]:
        """Return the selected comparisons, one per pair of experiments."""
        return list(self.by_pair.values())


def select(records: Iterable[Record]) -> Selection:
    """Return the records that claims and figures use, selected from the records of all suites."""
    by_name: dict[tuple[str, str], ExperimentRecord] = {}
    by_pair: dict[tuple[str, str], ComparisonRecord] = {}
    every = list(records)
    seen = [record for record in every if isinstance(record, ExperimentRecord | ComparisonRecord)]
    scored = [record for record in every if isinstance(record, EvaluationRecord) and record.outcome == "ok"]
    ours = _of_today(seen)
    for record in ours:
        if isinstance(record, ComparisonRecord):
            subject, baseline = (f"{record.suite}/{side.name}" for side in (record.subject, record.baseline))
            by_pair[subject, baseline] = record
        elif isinstance(record, ExperimentRecord):
            at = (record.evidence, record.label)
            before = by_name.get(at)
            if before is None or record.conclusive or not before.conclusive:
                by_name[at] = record
    return Selection(
        by_name=dict(sorted(by_name.items(), key=lambda item: _sort_key(*item[0]))),
        by_pair=dict(sorted(by_pair.items(), key=lambda item: _sort_key(*item[0]))),
        evaluations=sorted(scored, key=lambda record: record.order),
        fits=[record for record in _of_today(every) if isinstance(record, FitRecord)],
        older=len(ours) - len(by_name) - len(by_pair),
        foreign=len(seen) - len(ours),
    )


def _sort_key(*names: str) -> list[list[str]]:
    """Return a sort key of `suite/name` texts, by suite first and then by name."""
    return [name.split("/", 1) for name in names]


def by_key(
    records: Iterable[Record], evidence: str = MEASURED, *, without: tuple[str, ...] = ()
) -> dict[str, ExperimentRecord]:
    """Return each experiment's newest record by key, for one kind of evidence, without outcomes in `without`."""
    return {
        record.key: record
        for record in _of_today(records)
        if isinstance(record, ExperimentRecord)
        and record.evidence == evidence
        and record.outcome not in without
    }


def launches_by_key(records: Iterable[Record]) -> dict[str, list[ExperimentRecord]]:
    """Return all successful measured records by experiment key, oldest first; each launch wrote one record."""
    found: dict[str, list[ExperimentRecord]] = {}
    for record in _of_today(records):
        if isinstance(record, ExperimentRecord) and (record.evidence, record.outcome) == (MEASURED, "ok"):
            found.setdefault(record.key, []).append(record)
    return found


def by_keys(records: Iterable[Record]) -> dict[tuple[str, str], ComparisonRecord]:
    """Return the newest comparison of each pair of experiments, by their keys (baseline, subject)."""
    return {
        (record.baseline.key, record.subject.key): record
        for record in _of_today(records)
        if isinstance(record, ComparisonRecord)
    }


def of_today(record: Record) -> bool:
    """Return whether the record has the current version of the measurement protocol."""
    return record.protocol == PROTOCOL


def _of_today(records: Iterable[Record]) -> list[Record]:
    """Return the records of the current measurement protocol, oldest first."""
    return sorted(filter(of_today, records), key=lambda record: record.order)
