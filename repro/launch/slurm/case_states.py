"""States of all submitted experiments (cases), from SLURM, from the progress files of their jobs, and from the store.

Each submission has a folder in `results/jobs`. `repro submit` writes `submission.json` there before the first `sbatch`
and after each one. The file thus names every submitted job, even if `repro submit` is killed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from repro.config import Experiment
from repro.config.errors import ConfigError
from repro.launch import rank_process
from repro.launch.failures import JOB_ENDS, failure_class
from repro.launch.slurm.allocation.bundle import Bundle, SubmissionWork
from repro.launch.slurm.scheduler import JobState, Scheduler
from repro.results.schema import ExperimentRecord
from repro.results.select import by_key
from repro.results.store import Store
from repro.util.files import read_json, write_json

SUBMISSION_FILE = "submission.json"
_LOCK_TIMEOUT_S = 600.0
"""Age after which the lock of another `repro submit` counts as abandoned, in seconds."""


@dataclass(frozen=True, kw_only=True)
class SubmittedArray:
    """SLURM job array of one submission, as `submission.json` lists it."""

    bundles: list[int]
    """Indices in `work.json` of the bundles of experiments, one bundle per element of the job array."""
    nodes: int
    tasks_per_node: int
    time_limit_s: float
    partition: str
    job_name: str
    """Job name in SLURM, which contains the submission's id and identifies a job whose `job_id` was not written."""
    job_id: str = ""
    """SLURM's id of the job array; empty until `sbatch` has returned the id."""

    def element(self, place: int) -> str:
        """Return SLURM's job id of element number `place` of the job array; empty before `sbatch` has returned."""
        if not self.job_id:
            return ""
        return self.job_id if len(self.bundles) == 1 else f"{self.job_id}_{place}"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Content of `submission.json`: one call of `repro submit` and its job arrays."""

    id: str
    created: str
    """Time in UTC at which `repro submit` was called, in ISO 8601 format."""
    suite: str
    suite_file: str
    profile: str
    """Path of the site profile; the submission's folder contains a copy of this file, `profile.toml`."""
    system: str
    newest_record: int | None = None
    """Sort key, in order of writing, of the store's newest record when `repro submit` ran; None in old files."""
    arrays: list[SubmittedArray] = field(default_factory=list)

    def jobs(self) -> dict[int, str]:
        """Return SLURM's job id of each bundle (experiments of one job), by index; empty if it was not submitted."""
        return {bundle: a.element(place) for a in self.arrays for place, bundle in enumerate(a.bundles)}

    def with_job(self, place: int, job_id: str) -> Submission:
        """Return a copy of the submission in which job array number `place` has SLURM's id `job_id`."""
        arrays = [replace(a, job_id=job_id) if i == place else a for i, a in enumerate(self.arrays)]
        return replace(self, arrays=arrays)


class Registry:
    """Submissions to SLURM whose results go to one store: their folders and files, and the lock of `repro submit`."""

    def __init__(self, results: Path):
        self.folder = results / "jobs"

    def path(self, submission: Submission) -> Path:
        return self.folder / submission.id

    def new_id(self, suite: str) -> str:
        """Return an id for a new submission, which begins with the time and contains the suite's name."""
        clean = re.sub(r"[^\w.-]+", "-", suite)[:40]
        return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{clean}-{secrets.token_hex(2)}"

    def write(self, submission: Submission) -> None:
        """Write `submission.json`, and create the submission's folder if it is missing."""
        folder = self.path(submission)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUBMISSION_FILE, asdict(submission))

    def all(self) -> list[Submission]:
        """Return every submission of the store, oldest first.  Raises `ConfigError` for an invalid file."""
        return [self._read(path) for path in sorted(self.folder.glob(f"*/{SUBMISSION_FILE}"))]

    def work(self, submission: Submission) -> SubmissionWork:
        """Return the content of the submission's `work.json`.  Raises `ConfigError` if the file is not valid."""
        folder = self.path(submission)
        try:
            return SubmissionWork.load(folder)
        except (OSError, ValueError, KeyError) as error:
            raise _bad(folder / "work.json", error) from None

    def state(self, submission: Submission, bundle: int) -> dict[str, Any]:
        """Return the progress file of a bundle (the experiments of one SLURM job); empty before the job starts."""
        return read_json(self.path(submission) / f"bundle-{bundle}.json")

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Hold the store's lock inside the context, so that two `repro submit` do not submit the same experiments.

        The lock is a file created with O_EXCL, because shared file systems may lack flock.  The lock of a dead process
        of this host, or an old lock, is replaced.  Raises `ConfigError` if another process holds the lock.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ".submitting"
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        for _ in range(2):
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except FileExistsError:
                if not _abandoned(path):
                    expected = f"another `repro submit` uses this store; if none runs, remove {path}"
                    raise ConfigError("--results", str(self.folder.parent), says=expected) from None
                path.unlink(missing_ok=True)
        else:
            raise ConfigError(
                "--results", str(self.folder.parent), says=f"cannot create the lock file {path}"
            )
        try:
            os.write(descriptor, note.encode())
            os.close(descriptor)
            yield
        finally:
            path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Submission:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            arrays = [SubmittedArray(**row) for row in document.pop("arrays")]
            return Submission(**document, arrays=arrays)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _bad(path, error) from None


def _abandoned(path: Path) -> bool:
    try:
        note = json.loads(path.read_text(encoding="utf-8") or "{}")
        old = time.time() - path.stat().st_mtime > _LOCK_TIMEOUT_S
    except (OSError, ValueError):
        return False
    is_here = note.get("host") == socket.gethostname()
    return old or (is_here and not rank_process.process_state(note.get("pid", 0)))


def _bad(path: Path, error: Exception) -> ConfigError:
    problem = f"{type(error).__name__}: {error}"
    expected = f"the file is not valid for `repro submit` ({problem}); remove its folder if it is unused"
    return ConfigError("submission", path.parent.name, says=expected, file=str(path))


PENDING, RUNNING, DONE, FAILED = "pending", "running", "done", "failed"
REQUEUED, CANCELLED, LOST, UNSUBMITTED = "requeued", "cancelled", "lost", "not submitted"
OPEN_STATES = (PENDING, RUNNING, REQUEUED)
STATES = (RUNNING, PENDING, REQUEUED, DONE, FAILED, CANCELLED, LOST, UNSUBMITTED)


@dataclass(frozen=True, kw_only=True)
class CaseState:
    """State of one experiment of one submission."""

    submission: str
    suite: str
    name: str
    key: str
    bundle: int
    job: str
    """SLURM's id of the experiment's job, for example `12_3`; empty if `sbatch` did not return an id."""
    state: str
    """One of `STATES`."""
    detail: str = ""
    """Detail on an experiment's state: training step and steps/s, cause of the job's wait, or cause of the outcome."""
    outcome: str = ""
    """Recorded outcome; for an ended job without a record, the outcome that `repro collect` will record."""
    job_state: str = ""
    """State of the experiment's job in SLURM; empty if SLURM does not list the job."""
    nodes: str = ""
    restarts: int = 0
    recorded: bool = False
    """Whether the store has a record that is newer than this submission."""

    @property
    def failure(self) -> str:
        """Return the class of the experiment's failure, one of `FAILURE_CLASSES`; empty without a failure."""
        return failure_class(self.outcome, self.detail, self.job_state) if self.outcome else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the experiment's state and failure class as JSON data."""
        return asdict(self) | {"failure": self.failure}


def outcome_without_record(job: JobState | None) -> tuple[str, str]:
    """Return outcome and reason of an experiment without record from its SLURM `job` (None: unknown to SLURM)."""
    if job is None:
        return "error", "lost: SLURM no longer lists the job, and the job wrote no record"
    outcome, reason = "error", f"the job ended as {job.state} without a record"
    if (
        job.state in JOB_ENDS
    ):  # SLURM or the hardware ended the job, so its end is no result of the experiment.
        outcome, reason = "interrupted", JOB_ENDS[job.state][1]
    parts = [reason]
    if job.nodes:
        parts.append(f"on {job.nodes}")
    if job.exit_code not in ("", "0:0"):
        parts.append(f"exit code {job.exit_code}")
    if job.reason and job.reason.lower() not in ("nonzeroexitcode", "prolog"):
        parts.append(job.reason)
    return outcome, ", ".join(parts)


@dataclass(frozen=True)
class CaseSurvey:
    """Reader of the states of all submitted experiments. Each call reads files, records and SLURM's jobs once."""

    registry: Registry
    store: Store
    scheduler: Scheduler

    def cases(self) -> list[CaseState]:
        """Return the state of each experiment of each submission.  Raises `SchedulerError` if `squeue` fails."""
        chosen = self.registry.all()
        jobs = self.scheduler.jobs({job for s in chosen for job in s.jobs().values() if job})
        latest = by_key(self.store.records())
        found: list[CaseState] = []
        for submission in chosen:
            ids = submission.jobs()
            for bundle in self.registry.work(submission).bundles:
                job_id = ids.get(bundle.index, "")
                last = job_id, jobs.get(job_id), self.registry.state(submission, bundle.index)
                found += [_case(submission, bundle, e, *last, latest.get(e.key)) for e in bundle.experiments]
        return found

    def live(self) -> dict[str, str]:
        """Return the ids of waiting or running SLURM jobs, by the keys of the experiments that they have to finish."""
        return {case.key: case.job for case in self.cases() if case.state in OPEN_STATES}


def _case(
    submission: Submission,
    bundle: Bundle,
    experiment: Experiment,
    job_id: str,
    job: JobState | None,
    last_state: dict[str, Any],
    record: ExperimentRecord | None,
) -> CaseState:
    """Return the state of one submitted `experiment`; `last_state` is the content of its bundle's progress file."""
    own = record if record is not None and _is_later(record, submission) else None
    base = CaseState(
        submission=submission.id,
        suite=submission.suite,
        name=experiment.name,
        key=experiment.key,
        bundle=bundle.index,
        job=job_id,
        state=PENDING,
        nodes=(job.nodes if job else "") or ",".join(last_state.get("nodes", [])),
        restarts=max(int(last_state.get("restarts", 0)), job.restarts if job else 0),
        job_state=job.state if job else "",
        recorded=own is not None,
    )
    if own is not None and own.conclusive:
        return replace(base, state=DONE, detail=own.reason, outcome=own.outcome)
    if not job_id:
        return replace(base, state=UNSUBMITTED, detail="`repro submit` was stopped before sbatch answered")
    if own is not None and own.outcome != "interrupted":
        return replace(base, state=FAILED, detail=own.reason, outcome=own.outcome)
    if job is not None and job.live:
        return _live(base, job, last_state)
    outcome, reason = outcome_without_record(job)
    # The job wrote a record of its interruption, and SLURM did not requeue the job.
    if own is not None and own.reason != reason:
        reason = f"{own.reason}; {reason}" if job is not None else own.reason
        outcome = own.outcome
    lost = replace(base, state=LOST, detail=reason, outcome=outcome)
    return replace(lost, state=CANCELLED) if lost.failure == "cancelled" else lost


def _live(base: CaseState, job: JobState, last_state: dict[str, Any]) -> CaseState:
    """Return the state of an experiment without an outcome whose job waits or runs."""
    current, stopped = last_state.get("current") or {}, last_state.get("stopped") or {}
    if job.waiting:
        state = REQUEUED if base.restarts or stopped else PENDING
        release = f"`scontrol release {base.job}` releases the job" if "held" in job.reason.lower() else ""
        parts = (stopped.get("reason", ""), job.reason, release)
        return replace(base, state=state, detail=", ".join(part for part in parts if part))
    if base.name != current.get("case"):
        turns = current.get("compare") and base.name in current["names"]
        detail = (
            f"one job runs this case in turns with {current['case']}, to compare them"
            if turns
            else "the job of this case runs other cases first"
        )
        return replace(base, state=RUNNING, detail=detail)
    rate = current.get("steps_per_s")
    place = f"step {current.get('step', 0)} of {current.get('steps', 0)}, {current.get('phase', '')}"
    return replace(base, state=RUNNING, detail=place + (f", {rate:.2f} steps/s" if rate else ""))


def _is_later(record: ExperimentRecord, submission: Submission) -> bool:
    """Return whether a record was written after a submission, by the store's order, as clocks of nodes may differ."""
    if submission.newest_record is None:
        return datetime.fromisoformat(record.written) >= datetime.fromisoformat(submission.created)
    return record.order > submission.newest_record


def read_case_states(registry: Registry, store: Store, every: bool) -> tuple[list[CaseState], list[str]]:
    """Return experiments' states in their last submission (`every`: in each) and warnings.  Raises `SchedulerError`."""
    scheduler = Scheduler()
    cases = CaseSurvey(registry, store, scheduler).cases()
    if not every:
        cases = list({case.key: case for case in cases}.values())
    return cases, list(dict.fromkeys(scheduler.warnings))


def status_exit_code(cases: list[CaseState]) -> int:
    """Return the exit code of `repro status`: 3 if an experiment waits or runs, else 1 if one is not done, else 0."""
    states = {case.state for case in cases}
    if states & {*OPEN_STATES}:
        return 3
    return 1 if states - {DONE} else 0
