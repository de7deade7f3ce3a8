"""A job whose answer the submitting process waits for: the near side of `repro.launch.slurm.allocation.errand`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from repro.config import ConfigError
from repro.launch.job import Interrupt, Job
from repro.launch.slurm.allocation.errand import ANSWER, JOB, Errand
from repro.launch.slurm.site.profile import Profile
from repro.launch.slurm.site.scheduler import JobState, Scheduler, SchedulerError
from repro.launch.slurm.submission import script
from repro.launch.slurm.submission.pack import Array

POLL_S = 1.0
SILENCE_S = 120.0
"""How long SLURM may not answer."""
LATE_S = 20.0
"""Shared folders may show a file this late; a job may take as long to leave the queue."""


def submit(folder: Path, job: Job, site: Profile, array: Array, name: str, *, target: str) -> str:
    """Hand the errand to submitit; SLURM's number of it.  `folder` exists and every node sees it.

    `array`: one without bundles, for its shape.  Raises `SchedulerError`.
    """
    import submitit

    job.save(folder / JOB)
    shutil.copyfile(site.file, folder / "profile.toml")
    wanted = script.parameters(array, site, name)
    options = {key: value for key, value in wanted["additional_parameters"].items() if key != "requeue"}
    wanted["additional_parameters"] = options | {"no_requeue": True}
    executor = submitit.SlurmExecutor(folder / "submitit", max_num_timeout=0, python=script.python(site))
    executor.update_parameters(**wanted)
    try:
        return str(executor.submit(Errand(str(folder), target)).job_id)
    except (submitit.core.utils.FailedSubmissionError, submitit.core.utils.FailedJobError) as error:
        raise SchedulerError(" ".join(str(error).split())[:400]) from None


def wait(job_id: str, folder: Path, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
    """The answer of the job, once it has left the queue; an interrupt cancels it.

    What the job could not say itself is an answer too, with the outcome `error`.
    """
    scheduler, last, heard = Scheduler(), "", time.monotonic()
    while not interrupt:
        try:
            state = scheduler.jobs([job_id]).get(job_id)
            heard = time.monotonic()
        except SchedulerError as error:
            if time.monotonic() - heard > SILENCE_S:
                return _failed(f"SLURM does not answer any more: {error}")
            time.sleep(POLL_S)
            continue
        if state is None or not state.live:
            patience = LATE_S if state is None or state.state == "COMPLETED" else POLL_S
            return _answer(folder, patience) or _failed(_how_it_ended(job_id, state, folder))
        said = f"job {job_id} is {state.state}" + (f": {state.reason}" if state.reason else "")
        if said != last and not quiet:
            print(f"{said} {state.nodes}".strip(), file=sys.stderr)
        last = said
        time.sleep(POLL_S)
    try:
        scheduler.cancel([job_id])
        end = time.monotonic() + LATE_S
        while time.monotonic() < end and scheduler.jobs([job_id]).get(job_id, JobState(state="GONE")).live:
            time.sleep(POLL_S)
    except SchedulerError as error:
        return _failed(f"job {job_id} could not be cancelled: {error}")
    return {"outcome": "interrupted", "reason": f"cancelled job {job_id}", "results": []}


def _answer(folder: Path, seconds: float) -> dict[str, Any] | None:
    end = time.monotonic() + seconds
    while True:
        try:
            answer: dict[str, Any] = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
            return answer
        except FileNotFoundError:
            if time.monotonic() > end:
                return None
            time.sleep(POLL_S)


def _failed(reason: str) -> dict[str, Any]:
    return {"outcome": "error", "reason": reason, "results": []}


def _how_it_ended(job_id: str, state: JobState | None, folder: Path) -> str:
    """One line: SLURM's word, and the last line that the first task wrote to standard error."""
    word = f"{state.state} {state.reason}".strip() if state is not None else "an unknown state"
    lines = []
    for path in sorted((folder / "submitit").glob("*_0_log.err")):
        lines += path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = f": {lines[-1][:300]}" if lines else ""
    return f"job {job_id} ended in {word}{said}"


def check_place(site: Profile, folder: Path) -> None:
    """Every node sees `folder`.  Raises `ConfigError`."""
    if site.storage.shared:
        shared = Path(site.storage.shared).expanduser()
        if not folder.resolve().is_relative_to(shared.resolve()):
            expected = f"a file below {shared}, the shared folder of {site.file}"
            raise ConfigError("--output", str(folder), expected)
