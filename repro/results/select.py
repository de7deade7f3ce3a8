"""Which record counts.  Nothing else decides that.

Records of another measurement protocol never count: they are not comparable with today's.  By key, the newest record
says what is known of an experiment, so that one that failed after a success is run again.  By name, as claims, figures
and pages ask, the newest conclusive record counts, and the newest failure where there is none.  Measured and simulated
evidence of one experiment never stand for each other.
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
    Record,
)


@dataclass(frozen=True)
class Selection:
    """The records that count, by name; a name is `suite/name`."""

    by_name: dict[tuple[str, str], ExperimentRecord]
    """(evidence, name) -> the record."""
    by_pair: dict[tuple[str, str], ComparisonRecord]
    """(subject, baseline) -> the newest comparison."""
    evaluations: list[EvaluationRecord]
    """Those that came to an end, oldest first."""
    older: int
    """Records that another one of the same experiment replaces."""
    foreign: int
    """Records of another measurement protocol."""

    @property
    def measured(self) -> list[ExperimentRecord]:
        """One of each measured experiment, by name."""
        return [record for record in self.by_name.values() if record.evidence != SIMULATED]

    @property
    def simulated(self) -> list[ExperimentRecord]:
        """One of each simulated experiment, by name; figures of what was measured know nothing of them."""
        return [record for record in self.by_name.values() if record.evidence == SIMULATED]

    @property
    def comparisons(self) -> list[ComparisonRecord]:
        """One of each pair, by name."""
        return list(self.by_pair.values())


def select(records: Iterable[Record]) -> Selection:
    """The records that count, of all suites."""
    by_name: dict[tuple[str, str, str], ExperimentRecord] = {}
    by_pair: dict[tuple[str, str, str], ComparisonRecord] = {}
    every = list(records)
    seen = [record for record in every if isinstance(record, ExperimentRecord | ComparisonRecord)]
    scored = [record for record in every if isinstance(record, EvaluationRecord) and record.outcome == "ok"]
    ours = _of_today(seen)
    for record in ours:
        if isinstance(record, ComparisonRecord):
            by_pair[record.suite, record.subject.name, record.baseline.name] = record
        elif isinstance(record, ExperimentRecord):
            at = (record.evidence, record.suite, record.name)
            before = by_name.get(at)
            if before is None or record.conclusive or not before.conclusive:
                by_name[at] = record
    return Selection(
        by_name={
            (evidence, f"{suite}/{name}"): by_name[evidence, suite, name]
            for evidence, suite, name in sorted(by_name)
        },
        by_pair={
            (f"{suite}/{subject}", f"{suite}/{baseline}"): by_pair[suite, subject, baseline]
            for suite, subject, baseline in sorted(by_pair)
        },
        evaluations=sorted(scored, key=lambda record: record.order),
        older=len(ours) - len(by_name) - len(by_pair),
        foreign=len(seen) - len(ours),
    )


def by_key(
    records: Iterable[Record], evidence: str = MEASURED, *, without: tuple[str, ...] = ()
) -> dict[str, ExperimentRecord]:
    """The newest record of every experiment's key, of one kind of evidence and but for some outcomes."""
    return {
        record.key: record
        for record in _of_today(records)
        if isinstance(record, ExperimentRecord)
        and record.evidence == evidence
        and record.outcome not in without
    }


def by_keys(records: Iterable[Record]) -> dict[tuple[str, str], ComparisonRecord]:
    """The newest comparison of every (baseline's key, subject's key)."""
    return {
        (record.baseline.key, record.subject.key): record
        for record in _of_today(records)
        if isinstance(record, ComparisonRecord)
    }


def of_today(record: Record) -> bool:
    """Whether it was measured under today's protocol."""
    return record.protocol == PROTOCOL


def _of_today(records: Iterable[Record]) -> list[Record]:
    """Oldest first."""
    return sorted(filter(of_today, records), key=lambda record: record.order)
