"""Writer of records for the outcomes of a run's experiments, and the summary of the run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from repro.config import Experiment
from repro.config.suites import Entry, Suite
from repro.launch.job import Job
from repro.launch.progress import Progress
from repro.results.record_parts import KernelsRan, Provenance, RankResult, kernel_fallbacks
from repro.results.schema import CONCLUSIVE, MEASURED, ExperimentRecord, Record
from repro.results.select import by_key, by_keys
from repro.results.store import DISK_FULL, Store

Results: TypeAlias = Sequence[Mapping[str, Any]]
"""Results of one experiment: a list with a `RankResult` for each rank, as JSON objects."""


class DiskFull(Exception):
    """Exception for a full disk. The message names the file or folder that could not be written."""


@contextmanager
def disk_full_errors(place: Path, message: str = "") -> Iterator[None]:
    """Convert an `OSError` of a full disk inside the context to `DiskFull`. The default message names the path."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise DiskFull(message or f"disk full: {error.filename or place}") from None


class Recorder:
    """Writer of the result records of one `repro run`, which are either all measured or all simulated."""

    def __init__(
        self,
        suite: Suite,
        store: Store,
        progress: Progress,
        evidence: str = MEASURED,
        place: Provenance | None = None,
    ):
        """`place`: additional provenance of every record, for example the SLURM job and its nodes."""
        self.suite, self.store, self.progress, self.evidence = suite, store, progress, evidence
        self._place = place or {}
        self._source: Provenance = {}
        self._reported_fallbacks: set[str] = set()
        """Reasons for torch operators in place of CUDA kernels of which the user has already been warned."""

    def begin(self) -> None:
        """Collect provenance for the next records; call this before ranks start, because it disturbs their timing."""
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
        """Write the record of one experiment, which took `spent_s` seconds.  Raises `DiskFull`."""
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
        """Warn once per reason that torch's slower operators replaced CUDA kernels. `ran`: kernels and replacements."""
        for why, operators in kernel_fallbacks(ran).items():
            if why not in self._reported_fallbacks:
                self._reported_fallbacks.add(why)
                print(
                    f"warning: {name} ran torch's operators in place of CUDA kernels for {', '.join(operators)}: "
                    f"{why}\n(`repro doctor` shows the state of the kernels; this warning appears once)",
                    file=sys.stderr,
                    flush=True,
                )

    def simulated(self, experiment: Experiment, record: ExperimentRecord) -> None:
        """Write a simulated experiment's record, with provenance unless its outcome is `error`. Raises `DiskFull`."""
        from repro.simulate.record import failed_record

        if record.conclusive:
            record = replace(record, provenance=self._source)
        self._write(
            record,
            lambda reason: failed_record(experiment, reason, suite=self.suite.name, wall_s=record.wall_s),
        )

    def _write(self, written: ExperimentRecord, failed: Callable[[str], ExperimentRecord]) -> None:
        """Append a record and display its outcome; on a full disk, append the smaller record `failed(reason)`."""
        full = ""
        try:
            self._append(written, f"disk full while writing the result to {self.store.folder}")
        except DiskFull as error:
            # The store has freed its reserved disk space, which is large enough for the record of a failure.
            full = str(error)
            written = failed(full)
            self._append(written, f"{written.reason}, and the record of {written.name} did not fit on disk")
        expected = self.suite.entry(written.name).expect in ("", written.outcome)
        self.progress.ended(written.name, written.outcome, written.reason, written.wall_s, expected=expected)
        if full:
            raise DiskFull(full)

    def ratios(self, job: Job, finished: dict[int, Results]) -> None:
        """Write the samples/s of each compared experiment relative to the baseline (index 0).  Raises `DiskFull`."""
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
        """Copy records of other suites into this suite, under its names, for `entries` with equal settings."""
        records = [record for record in self.store.records() if isinstance(record, ExperimentRecord)]
        latest = by_key(records, self.evidence)
        known = {(record.suite, record.name, record.original) for record in records}
        for entry in entries:
            name, record = entry.experiment.name, latest.get(entry.experiment.key)
            if record is None or not record.conclusive:
                continue
            if (self.suite.name, name, record.original) not in known:
                self._append(record.copy(entry.experiment, self.suite.name))

    def _append(self, record: Record, message: str = "") -> None:
        with disk_full_errors(self.store.folder, message or f"disk full: {self.store.folder}"):
            self.store.append(record)


def summarise_run(
    suite: Suite,
    entries: list[Entry],
    store: Store,
    ran: set[str],
    needs: dict[str, str],
    evidence: str = MEASURED,
) -> dict[str, Any]:
    """Return the summary of a run as JSON data, with the newest record of every selected experiment.

    `ran`: names of the experiments that this run started. `needs`: requirements that this machine lacks, by experiment.
    """
    records = store.records()
    latest = by_key(records, evidence)
    rows = []
    for entry in entries:
        record = latest.get(entry.experiment.key)
        outcome = record.outcome if record else "not run"
        lacking = "" if record else needs[entry.experiment.name]
        logs = store.root / "logs" / entry.experiment.key
        rows.append(
            {
                "name": entry.experiment.name,
                "key": entry.experiment.key,
                "outcome": outcome,
                "expected": None if lacking or not entry.expect else outcome == entry.expect,
                "reason": record.reason if record else lacking and f"needs {lacking}",
                "already_known": entry.experiment.name not in ran,
                "logs": str(logs) if outcome not in CONCLUSIVE and logs.exists() else "",
            }
        )
    keys = {row["key"] for row in rows}
    ratios = [
        {
            "subject": record.subject.name,
            "baseline": record.baseline.name,
            **{name: getattr(record, name) for name in ("metric", "ratio", "low", "high", "rounds")},
        }
        for pair, record in by_keys(records).items()
        if set(pair) <= keys and evidence == MEASURED
    ]
    return {
        "suite": suite.name,
        "evidence": evidence,
        "results": str(store.root),
        "counts": dict(Counter(row["outcome"] for row in rows)),
        "experiments": rows,
        "comparisons": ratios,
        "skipped_lines": store.skipped,
    }


@dataclass(frozen=True)
class RunEnd:
    """Summary and exit code of `repro run` for one suite."""

    summary: dict[str, Any]
    """Summary of the run as JSON data; its key `stopped` says why the run ended early, or is empty."""
    code: int
    """Exit code of `repro run`: 128 plus the number of a signal, 1 after an unexpected outcome, else 0."""


def run_end(summary: dict[str, Any], *, failure: str, signal: int) -> RunEnd:
    """Return summary and exit code of a run that `failure` (empty: none) or a `signal` (0: none) may have stopped."""
    summary["stopped"] = failure or (f"by signal {signal}" if signal else "")
    wrong = failure or any(row["expected"] is False for row in summary["experiments"])
    return RunEnd(summary, 128 + signal if signal else int(bool(wrong)))
