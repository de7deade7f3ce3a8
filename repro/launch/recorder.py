"""Put what came of experiments into the store, and say so; with a full disk, at least the outcome."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from repro.config import Experiment
from repro.config.suites import Entry, Suite
from repro.launch.job import Job
from repro.launch.progress import Progress
from repro.results import select
from repro.results.record_parts import KernelsRan, Provenance, RankResult, kernel_fallbacks
from repro.results.schema import MEASURED, ExperimentRecord, Record
from repro.results.store import DISK_FULL, Store

Results: TypeAlias = Sequence[Mapping[str, Any]]
"""What the ranks of a launch hand in of one experiment, as JSON data."""


class DiskFull(Exception):
    """There is no room for results; `str` says where."""


class Recorder:
    """Writes the records of one `repro run`, all of one kind of evidence."""

    def __init__(
        self,
        suite: Suite,
        store: Store,
        progress: Progress,
        evidence: str = MEASURED,
        place: Provenance | None = None,
    ):
        """`place`: what the provenance of every record says besides, of failures too: the job, its nodes."""
        self.suite, self.store, self.progress, self.evidence = suite, store, progress, evidence
        self._place = place or {}
        self._source: Provenance = {}
        self._told: set[str] = set()
        """Reasons why CUDA kernels did not run."""

    def begin(self) -> None:
        """Look up where the coming records come from: before the ranks start, so as not to disturb them."""
        from repro.measure.provenance import provenance

        self._source = {**provenance(), **self._place}

    def outcome(
        self,
        experiment: Experiment,
        spent_s: float,
        *,
        results: Results | None = None,
        outcome: str = "ok",
        reason: str = "",
    ) -> None:
        """Record how one experiment ended.  `results`: all ranks' (`RankResult`).  Raises `DiskFull`."""
        from repro.results.measured import experiment_record

        def record(results: Results, outcome: str, reason: str) -> ExperimentRecord:
            return experiment_record(
                experiment,
                [RankResult.read(result) for result in results],
                suite=self.suite.name,
                provenance=self._source if results else self._place,
                wall_s=spent_s,
                outcome=outcome,
                reason=reason,
            )

        written = record(results or [], outcome, reason)
        self._write(written, lambda reason: record([], "error", reason))
        self._warn(experiment.name, written.kernels or {})

    def _warn(self, name: str, ran: KernelsRan) -> None:
        """Say once why torch's operators ran in place of CUDA kernels, or a slow run would look like a fast one."""
        for why, operators in kernel_fallbacks(ran).items():
            if why not in self._told:
                self._told.add(why)
                print(
                    f"warning: {name} ran torch's operators in place of CUDA kernels for {', '.join(operators)}: "
                    f"{why}\n(`repro doctor` says how kernels stand; this is said once)",
                    file=sys.stderr,
                    flush=True,
                )

    def simulated(self, experiment: Experiment, record: ExperimentRecord) -> None:
        """Write the record of a simulated `experiment`, with where it comes from.  Raises `DiskFull`."""
        from repro.simulate.record import failed_record

        if record.conclusive:
            record = replace(record, provenance=self._source)
        self._write(
            record,
            lambda reason: failed_record(experiment, reason, suite=self.suite.name, wall_s=record.wall_s),
        )

    def _write(self, written: ExperimentRecord, failed: Callable[[str], ExperimentRecord]) -> None:
        """Append a record and say so; where the disk is full, that of its failure, which `failed` makes."""
        full = ""
        try:
            self.store.append(written)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            # The store has freed its reserve: the outcome fits even if the measurement does not.
            full = f"disk full while writing the result to {self.store.folder}"
            written = failed(full)
            self._last_word(written)
        expected = self.suite.entry(written.name).expect in ("", written.outcome)
        self.progress.ended(written.name, written.outcome, written.reason, written.wall_s, expected=expected)
        if full:
            raise DiskFull(full)

    def ratios(self, job: Job, finished: dict[int, Results]) -> None:
        """Record the ratios of a compared job whose experiments have finished.  Raises `DiskFull`."""
        from repro.results.measured import comparison_record

        ranks = {index: [RankResult.read(result) for result in found] for index, found in finished.items()}
        for index in range(1, len(job.experiments)):
            if not {0, index} <= ranks.keys():
                continue
            record = comparison_record(
                job.experiments[0],
                job.experiments[index],
                (ranks[0], ranks[index]),
                suite=self.suite.name,
                provenance=self._source,
            )
            if record is not None:
                self._append(record)

    def adopt(self, entries: list[Entry]) -> None:
        """Record under this suite's names what the store knows under others: equal key, equal experiment."""
        latest = select.by_key(self.store.records(), self.evidence)
        for entry in entries:
            name, record = entry.experiment.name, latest.get(entry.experiment.key)
            if record is None or not record.conclusive:
                continue
            if (record.suite, record.name) != (self.suite.name, name):
                self._append(record.copy(entry.experiment, self.suite.name))

    def _append(self, record: Record) -> None:
        try:
            self.store.append(record)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise DiskFull(f"disk full: {self.store.folder}") from None

    def _last_word(self, record: ExperimentRecord) -> None:
        try:
            self.store.append(record)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise DiskFull(f"{record.reason}, and the outcome of {record.name} did not fit") from None
