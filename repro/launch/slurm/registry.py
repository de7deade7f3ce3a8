"""What was submitted, under `results/jobs`: a folder for each submission, and what SLURM calls its jobs.

`submission.json` is written before the first `sbatch` and after each: whoever reads it after a kill
knows what may be running.  Nothing here is needed to read results: those are in the store.
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
from repro.util.files import write_json

SUBMISSION_FILE = "submission.json"
_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SubmittedArray:
    """One job array as SLURM knows it."""

    bundles: list[int]
    """Indices in `work.json`, in the order of the array's elements."""
    nodes: int
    tasks_per_node: int
    time_limit_s: float
    partition: str
    job_name: str
    """Names submission and array, so that a job can be found whose number was never written down."""
    job_id: str = ""
    """Empty until `sbatch` has answered."""

    def element(self, place: int) -> str:
        """SLURM's id of the array's element number `place`."""
        if not self.job_id:
            return ""
        return self.job_id if len(self.bundles) == 1 else f"{self.job_id}_{place}"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One `repro submit`."""

    id: str
    created: str
    """UTC, ISO 8601."""
    suite: str
    suite_file: str
    profile: str
    """The profile's file; `profile.toml` beside this file is its copy."""
    system: str
    newest_record: int | None = None
    """`order` of the newest record in the store at creation; None in submissions of versions without the field."""
    arrays: list[SubmittedArray] = field(default_factory=list)

    def jobs(self) -> dict[int, str]:
        """SLURM's id of every bundle; empty for one that was never submitted."""
        return {
            bundle: array.element(place)
            for array in self.arrays
            for place, bundle in enumerate(array.bundles)
        }

    def with_job(self, place: int, job_id: str) -> Submission:
        """The same, with the number of array `place`."""
        arrays = [replace(a, job_id=job_id) if i == place else a for i, a in enumerate(self.arrays)]
        return replace(self, arrays=arrays)


class Registry:
    """The submissions of one store."""

    def __init__(self, results: Path):
        self.folder = results / "jobs"

    def path(self, submission: Submission | str) -> Path:
        """The folder of a submission."""
        return self.folder / (submission if isinstance(submission, str) else submission.id)

    def new_id(self, suite: str) -> str:
        """A name that sorts by time and says what it is."""
        clean = re.sub(r"[^\w.-]+", "-", suite)[:40]
        return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{clean}-{secrets.token_hex(2)}"

    def write(self, submission: Submission) -> None:
        """Store `submission`; its folder exists afterwards."""
        folder = self.path(submission)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUBMISSION_FILE, asdict(submission))

    def all(self) -> list[Submission]:
        """Every submission, oldest first.  Raises `ConfigError` for a file that is none."""
        return [self._read(path) for path in sorted(self.folder.glob(f"*/{SUBMISSION_FILE}"))]

    def work(self, submission: Submission) -> SubmissionWork:
        """What `submission` has to do.  Raises `ConfigError` if the file is gone or torn."""
        folder = self.path(submission)
        try:
            return SubmissionWork.load(folder)
        except (OSError, ValueError, KeyError) as error:
            raise _bad(folder / "work.json", error) from None

    def state(self, submission: Submission, bundle: int) -> dict[str, Any]:
        """What the allocation of `bundle` wrote last about itself; empty before its first word."""
        try:
            text = (self.path(submission) / f"bundle-{bundle}.json").read_text(encoding="utf-8")
        except OSError:
            return {}
        state: dict[str, Any] = json.loads(text)
        return state

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Only one `repro submit` plans on a store at a time, or both would submit the same cases.

        A file made with O_EXCL, since shared file systems may be without flock.  One that was left by a
        killed process on this host, or is old, is taken over.  Raises `ConfigError` if another is at work.
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
    return old or (
        note.get("host") == socket.gethostname() and not rank_process.process_state(note.get("pid", 0))
    )


def _bad(path: Path, error: Exception) -> ConfigError:
    expected = f"is not what `repro submit` wrote ({type(error).__name__}: {error}); remove its folder if it has no use"
    return ConfigError("submission", path.parent.name, says=expected, file=str(path))
