"""Put what came of experiments into the store, and say so; with a full disk, at least the outcome."""

from __future__ import annotations

import uuid
from typing import Any

from repro.config import Experiment
from repro.launch.job import Job
from repro.launch.progress import Progress
from repro.results.store import CONCLUSIVE, DISK_FULL, Store
from repro.suites import Entry, Suite


class DiskFull(Exception):
    """There is no room for results; ``str`` says where."""


class Recorder:
    """Writes the records of one ``repro run``."""

    def __init__(self, suite: Suite, store: Store, progress: Progress):
        self.suite, self.store, self.progress = suite, store, progress
        self._source: dict[str, Any] = {}

    def begin(self) -> None:
        """Look up where the coming records come from: before the ranks start, so as not to disturb them."""
        from repro.measure.provenance import provenance

        self._source = provenance()

    def outcome(
        self,
        experiment: Experiment,
        spent_s: float,
        *,
        results: list[dict[str, Any]] | None = None,
        outcome: str = "ok",
        reason: str = "",
    ) -> None:
        """Record how one experiment ended.  Raises ``DiskFull``."""
        from repro.results.record import experiment_record

        def record(results: list[dict[str, Any]], outcome: str, reason: str) -> dict[str, Any]:
            return experiment_record(
                experiment,
                results,
                suite=self.suite.name,
                provenance=self._source if results else {},
                wall_s=spent_s,
                outcome=outcome,
                reason=reason,
            )

        written = record(results or [], outcome, reason)
        full = ""
        try:
            self.store.append(written)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            # The store has freed its reserve: the outcome fits even if the measurement does not.
            full = f"disk full while writing the result to {self.store.folder}"
            written = record([], "error", full)
            self._last_word(written)
        expected = written["outcome"] == self.suite.entry(experiment.name).expect
        self.progress.ended(
            experiment.name, written["outcome"], written["reason"], spent_s, expected=expected
        )
        if full:
            raise DiskFull(full)

    def ratios(self, job: Job, finished: dict[int, list[dict[str, Any]]]) -> None:
        """Record the ratios of a compared job whose experiments have finished.  Raises ``DiskFull``."""
        from repro.results.record import comparison_record

        for index in range(1, len(job.experiments)):
            if not {0, index} <= finished.keys():
                continue
            record = comparison_record(
                job.experiments[0],
                job.experiments[index],
                (finished[0], finished[index]),
                suite=self.suite.name,
                provenance=self._source,
            )
            if record is not None:
                self._append(record)

    def adopt(self, entries: list[Entry]) -> None:
        """Record under this suite's names what the store knows under others: equal key, equal experiment."""
        latest = self.store.latest()
        for entry in entries:
            name, record = entry.experiment.name, latest.get(entry.experiment.key)
            if record is None or record["outcome"] not in CONCLUSIVE:
                continue
            if (record["suite"], record["name"]) != (self.suite.name, name):
                own = {"id": uuid.uuid4().hex, "suite": self.suite.name, "name": name}
                own["copy_of"] = record["id"]
                self._append({**record, **own, "experiment": entry.experiment.as_dict()})

    def _append(self, record: dict[str, Any]) -> None:
        try:
            self.store.append(record)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise DiskFull(f"disk full: {self.store.folder}") from None

    def _last_word(self, record: dict[str, Any]) -> None:
        try:
            self.store.append(record)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise DiskFull(f"{record['reason']}, and the outcome of {record['name']} did not fit") from None
