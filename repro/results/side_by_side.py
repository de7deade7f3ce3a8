"""Which results stand beside each other, and in which order: a group a suite and kind of evidence, never a mixture."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from repro.model.parameters import total
from repro.results.frames import experiment_row
from repro.results.schema import EMULATED, MEASURED, SIMULATED, ComparisonRecord, ExperimentRecord
from repro.results.select import Selection

KINDS = (MEASURED, EMULATED, SIMULATED)


@dataclass(frozen=True)
class Group:
    """Results that may be compared: of one suite and one kind of evidence."""

    suite: str
    evidence: str
    """`measured`, `emulated` or `simulated`."""
    records: list[ExperimentRecord]
    """By model, smallest first; of each the fastest first, and last those that have no speed."""
    comparisons: list[ComparisonRecord]
    """Of experiments that took turns."""

    def only(self, names: Container[str]) -> Group:
        """The part of it with these names."""
        return replace(
            self,
            records=[record for record in self.records if record.name in names],
            comparisons=[c for c in self.comparisons if c.subject.name in names and c.baseline.name in names],
        )


def matches(pattern: str, suite: str, name: str) -> bool:
    """Whether an experiment is meant by a suite's name or a glob of `name` or `suite/name`; all by none."""
    return not pattern or any(fnmatchcase(text, pattern) for text in (suite, name, f"{suite}/{name}"))


def groups(selection: Selection, pattern: str = "") -> list[Group]:
    """The groups of what `pattern` means, by suite."""
    found: dict[tuple[str, str], list[ExperimentRecord]] = {}
    for record in selection.by_name.values():
        if matches(pattern, record.suite, record.name):
            found.setdefault((record.suite, record.shown_as), []).append(record)
    return [
        Group(
            suite, kind, sorted(records, key=_order), _compared(selection.comparisons, suite, kind, records)
        )
        for (suite, kind), records in sorted(
            found.items(), key=lambda item: (item[0][0], KINDS.index(item[0][1]))
        )
    ]


def of_run(selection: Selection, suite: str, names: Iterable[str], evidence: str) -> list[Group]:
    """What came of a run of these experiments of a suite: of evidence `measured`, what is emulated too."""
    wanted, simulated = set(names), evidence == SIMULATED
    every = [
        g.only(wanted)
        for g in groups(selection)
        if g.suite == suite and (g.evidence == SIMULATED) == simulated
    ]
    return [group for group in every if group.records]


def _order(record: ExperimentRecord) -> tuple[Any, ...]:
    experiment, rate = record.experiment, experiment_row(record).get("tokens_per_s", 0.0)
    return total(experiment.model), experiment.model.name, experiment.system, -rate, record.name


def _compared(
    comparisons: Iterable[ComparisonRecord], suite: str, kind: str, records: Iterable[ExperimentRecord]
) -> list[ComparisonRecord]:
    names = {record.name for record in records}
    both = [c for c in comparisons if c.suite == suite and {c.subject.name, c.baseline.name} <= names]
    return [] if kind == SIMULATED else both  # what took turns did run
