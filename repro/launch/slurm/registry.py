"""Submissions under `results/jobs`: a folder for each, with SLURM's ids of its jobs.

`submission.json` is written before the first `sbatch` and after each, so that after a kill it names every job that may
run.  Results do not depend on these files: they are in the store.
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
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError
from repro.launch import rank_process
from repro.launch.slurm.allocation.bundle import SubmissionWork
from repro.util.files import read_json, write_json

SUBMISSION_FILE = "submission.json"
_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SubmittedArray:
    """One job array of a submission."""

    bundles: list[int]
    """Indices in `work.json`, in the order of the array's elements."""
    nodes: int
    tasks_per_node: int
    time_limit_s: float
    partition: str
    job_name: str
    """Name of submission and array, which identifies a job whose number was never written."""
    job_id: str = ""
    """Job id; empty until `sbatch` has answered."""

    def element(self, place: int) -> str:
        """Return SLURM's id of the array's element number `place`."""
        if not self.job_id:
            return ""
        return self.job_id if len(self.bundles) == 1 else f"{self.job_id}_{place}"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of `repro submit`."""

    id: str
    created: str
    """UTC, ISO 8601."""
    suite: str
    suite_file: str
    profile: str
    """File of the profile; `profile.toml` in the submission's folder is its copy."""
    system: str
    newest_record: int | None = None
    """`order` of the newest record in the store at creation; None in submissions of versions without the field."""
    arrays: list[SubmittedArray] = field(default_factory=list)

    def jobs(self) -> dict[int, str]:
        """Return SLURM's id of every bundle; empty for one that was never submitted."""
        return {bundle: a.element(place) for a in self.arrays for place, bundle in enumerate(a.bundles)}

    def with_job(self, place: int, job_id: str) -> Submission:
        """Return a copy with the job id of array `place`."""
        arrays = [replace(a, job_id=job_id) if i == place else a for i, a in enumerate(self.arrays)]
        return replace(self, arrays=arrays)


class Registry:
    """Submissions of one store."""

    def __init__(self, results: Path):
        self.folder = results / "jobs"

    def path(self, submission: Submission | str) -> Path:
        """Return the folder of a submission."""
        return self.folder / (submission if isinstance(submission, str) else submission.id)

    def new_id(self, suite: str) -> str:
        """Return a new id, which sorts by time and contains the suite's name."""
        clean = re.sub(r"[^\w.-]+", "-", suite)[:40]
        return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{clean}-{secrets.token_hex(2)}"

    def write(self, submission: Submission) -> None:
        """Store `submission`, and create its folder if needed."""
        folder = self.path(submission)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUBMISSION_FILE, asdict(submission))

    def all(self) -> list[Submission]:
        """Return every submission, oldest first.  Raises `ConfigError` for an invalid file."""
        return [self._read(path) for path in sorted(self.folder.glob(f"*/{SUBMISSION_FILE}"))]

    def work(self, submission: Submission) -> SubmissionWork:
        """Return the work of `submission`.  Raises `ConfigError` if the file is missing or incomplete."""
        folder = self.path(submission)
        try:
            return SubmissionWork.load(folder)
        except (OSError, ValueError, KeyError) as error:
            raise _bad(folder / "work.json", error) from None

    def state(self, submission: Submission, bundle: int) -> dict[str, Any]:
        """Return the last state file of the allocation of `bundle`; empty before the first."""
        return read_json(self.path(submission) / f"bundle-{bundle}.json")

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Hold the lock for planning on this store, so that two `repro submit` do not submit the same cases.

        The lock is a file created with O_EXCL, because shared file systems may lack flock.  A file of a killed
        process on this host, or an old file, is taken over.  Raises `ConfigError` if another process holds the lock.
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
                    expected = f"another `repro submit` is at work on this store; if not, remove {path}"
                    raise ConfigError("--results", str(self.folder.parent), says=expected) from None
                path.unlink(missing_ok=True)
        else:
            raise ConfigError("--results", str(self.folder.parent), says=f"cannot take {path}")
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
    expected = f"is not what `repro submit` wrote ({type(error).__name__}: {error}); remove its folder if it has no use"
    return ConfigError("submission", path.parent.name, says=expected, file=str(path))
