"""Submission to SLURM: of a suite as job arrays (`repro submit`), and of one job for whose results the caller waits."""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repro.config import ConfigError
from repro.config.words import count_noun
from repro.launch.job import Interrupt, Job
from repro.launch.slurm import profile
from repro.launch.slurm.allocation.controller import ANSWER_FILE, JOB_FILE, RunAwaitedJob, RunBundle
from repro.launch.slurm.case_states import CaseSurvey, Registry, Submission, SubmittedArray
from repro.launch.slurm.profile import Profile
from repro.launch.slurm.scheduler import JobState, Scheduler, SchedulerError
from repro.launch.slurm.submission import job_array, profile_check, submission_plan
from repro.launch.slurm.submission.job_array import JobArray
from repro.launch.slurm.submission.submission_plan import SubmissionPlan, plan_submission
from repro.results.store import Store
from repro.util import extras
from repro.util.files import read_json

POLL_INTERVAL_S = 1.0
SCHEDULER_TIMEOUT_S = 120.0
"""Maximum time in seconds for which failing SLURM queries are repeated during the wait for a job."""
ANSWER_DELAY_S = 20.0
"""Maximum time until this host sees a job's answer file, and until a cancelled job leaves the queue, in seconds."""


def submit_suite(
    suite: Path,
    profile_file: Path,
    results: Path,
    only: list[str],
    exclude: str,
    dry: bool,
    move: bool,
    rerun: bool,
    json: bool,
    details: bool = False,
) -> int:
    """Submit the experiments of `suite` that have no record and no live job.  Return 0, or 1 if `sbatch` failed.

    `exclude`: further excluded nodes, in the syntax of `sbatch --exclude`.  `dry`: print the plan without any query of
    SLURM.  Raises `ConfigError` before the first submission.
    """
    site = profile.load_profile(profile_file)
    if exclude:
        site = replace(site, slurm=replace(site.slurm, exclude=[*site.slurm.exclude, exclude]))
    results = results.absolute()
    profile_check.require_shared_folder(site, results)
    if dry:
        planned = plan_submission(suite, site, Store(results), only=only, move=move, rerun=rerun)
        submission_plan.print_submission_plan(planned, results, json=json, details=details)
        return 0
    if site.storage.private:
        os.umask(site.umask)
    extras.require_extras("slurm")
    registry, scheduler, store = Registry(results), Scheduler(), Store(results)
    profile_check.require_writable_folder(site, results)
    with registry.submitting():
        try:
            running = {} if rerun else CaseSurvey(registry, store, scheduler).live()
            planned = plan_submission(suite, site, store, only=only, move=move, rerun=rerun, running=running)
            profile_check.require_partition_limits(planned, scheduler)
        except SchedulerError as error:
            says = f"SLURM does not answer: {error}"
            raise ConfigError("--profile", str(profile_file), says=says) from None
        if planned.cases:
            return _submit_arrays(planned, registry, store.newest, json)
    if json:
        print(jsonlib.dumps({"submission": None, "jobs": [], "cases": 0, "failure": ""}))
    else:
        submission_plan.print_left_out(planned)
        print("Nothing to submit.")
    return 0


def _submit_arrays(planned: SubmissionPlan, registry: Registry, newest_record: int, json: bool) -> int:
    submission = _write_submission(planned, registry, newest_record)
    folder = registry.path(submission)
    failure = ""
    for place, array in enumerate(planned.arrays):
        bundles = [bundle.index for bundle in array.bundles]
        name = submission.arrays[place].job_name
        wanted = job_array.submitit_parameters(array, planned.profile, name)
        try:
            job_id = submit_array(folder, bundles, wanted, planned.profile, array.shape.requeues)
        except SchedulerError as error:
            failure = str(error)
            break
        submission = submission.with_job(place, job_id)
        registry.write(submission)
        if not json:
            print(f"job {job_id}: {submission_plan.describe_array(array)}")
    document = {
        "submission": submission.id,
        "jobs": [a.job_id for a in submission.arrays if a.job_id],
        "cases": len(planned.cases),
        "failure": failure,
    }
    if json:
        print(jsonlib.dumps(document))
    else:
        submission_plan.print_left_out(planned)
        cases = count_noun(len(planned.cases), "case")
        print(f"Submitted {cases} as {submission.id}. Next: repro status")
    if failure:
        print(f"error: sbatch failed; the other job arrays were not submitted: {failure}", file=sys.stderr)
    return 1 if failure else 0


def submit_array(
    folder: Path, bundles: list[int], wanted: dict[str, Any], site: Profile, requeues: int
) -> str:
    """Submit one job array and return its job id.  `wanted`: submitit's parameters.  Raises `SchedulerError`."""
    executor = _executor(folder, wanted, site, requeues)
    with _submission_errors(), executor.batch():  # submitit submits a single bundle of runs as a plain job
        jobs = [executor.submit(RunBundle(submission=str(folder), bundle=bundle)) for bundle in bundles]
    return str(jobs[0].job_id).split("_")[0]


def _executor(folder: Path, wanted: dict[str, Any], site: Profile, requeues: int) -> Any:
    """Return a submitit executor with the parameters `wanted`, whose log files are in `folder/submitit`."""
    import submitit

    python = job_array.python_command(site)
    executor = submitit.SlurmExecutor(folder / "submitit", max_num_timeout=requeues, python=python)
    executor.update_parameters(**wanted)
    return executor


@contextmanager
def _submission_errors() -> Iterator[None]:
    """Convert errors of submitit inside the context to `SchedulerError`, with a message of one line."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        yield
    except (FailedSubmissionError, FailedJobError) as error:
        raise SchedulerError(" ".join(str(error).split())[:400]) from None


def _write_submission(planned: SubmissionPlan, registry: Registry, newest_record: int) -> Submission:
    """Create the folder of a submission, with its profile, work file and `submission.json`; return the submission."""
    identity = registry.new_id(planned.suite.name)
    arrays = [
        SubmittedArray(
            bundles=[bundle.index for bundle in array.bundles],
            nodes=array.shape.nodes,
            tasks_per_node=array.shape.tasks_per_node,
            time_limit_s=array.shape.time_min * 60,
            partition=array.shape.partition,
            job_name=f"repro-{identity}-{place}",
        )
        for place, array in enumerate(planned.arrays)
    ]
    submission = Submission(
        id=identity,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        suite=planned.suite.name,
        suite_file=planned.suite.file,
        profile=planned.profile.file,
        system=planned.profile.system,
        newest_record=newest_record,
        arrays=arrays,
    )
    folder = registry.path(submission)
    folder.mkdir(parents=True)
    shutil.copyfile(planned.profile.file, folder / "profile.toml")
    planned.work().save(folder)
    registry.write(submission)
    return submission


def submit_job(folder: Path, job: Job, site: Profile, array: JobArray, name: str, *, target: str) -> str:
    """Submit `job` as one SLURM job with the resources of `array`, and return SLURM's id.  Raises `SchedulerError`.

    `folder`: shared folder for the job's files.  `target`: function that each rank calls, as `module:function`.
    """
    job.save(folder / JOB_FILE)
    shutil.copyfile(site.file, folder / "profile.toml")
    wanted = job_array.submitit_parameters(array, site, name)
    options = {key: value for key, value in wanted["additional_parameters"].items() if key != "requeue"}
    wanted["additional_parameters"] = options | {"no_requeue": True}
    executor = _executor(folder, wanted, site, 0)
    with _submission_errors():
        return str(executor.submit(RunAwaitedJob(str(folder), target)).job_id)


def wait_for_answer(job_id: str, folder: Path, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
    """Wait for a SLURM job and return its results (`answer.json`) or outcome `error`; an interrupt cancels the job."""
    scheduler, last_status, heard = Scheduler(), "", time.monotonic()
    while not interrupt:
        try:
            state = scheduler.jobs([job_id]).get(job_id)
            heard = time.monotonic()
        except SchedulerError as error:
            if time.monotonic() - heard > SCHEDULER_TIMEOUT_S:
                return _failed_answer(f"SLURM stopped answering: {error}")
            time.sleep(POLL_INTERVAL_S)
            continue
        if state is None or not state.live:
            patience = ANSWER_DELAY_S if state is None or state.state == "COMPLETED" else POLL_INTERVAL_S
            return _read_answer(folder, patience) or _failed_answer(_describe_end(job_id, state, folder))
        status = f"job {job_id} is {state.state}" + (f": {state.reason}" if state.reason else "")
        if status != last_status and not quiet:
            print(f"{status} {state.nodes}".strip(), file=sys.stderr)
        last_status = status
        time.sleep(POLL_INTERVAL_S)
    try:
        scheduler.cancel([job_id])
        end = time.monotonic() + ANSWER_DELAY_S
        while time.monotonic() < end and scheduler.jobs([job_id]).get(job_id, JobState(state="GONE")).live:
            time.sleep(POLL_INTERVAL_S)
    except SchedulerError as error:
        return _failed_answer(f"job {job_id} could not be cancelled: {error}")
    return {"outcome": "interrupted", "reason": f"cancelled job {job_id}", "results": []}


def _read_answer(folder: Path, seconds: float) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while not (answer := read_json(folder / ANSWER_FILE)) and time.monotonic() <= end:
        time.sleep(POLL_INTERVAL_S)
    return answer


def _failed_answer(reason: str) -> dict[str, Any]:
    return {"outcome": "error", "reason": reason, "results": []}


def _describe_end(job_id: str, state: JobState | None, folder: Path) -> str:
    """Describe the end of a SLURM job by its state and the last line of its controller's standard error."""
    word = f"{state.state} {state.reason}".strip() if state is not None else "unknown"
    lines = []
    for path in sorted((folder / "submitit").glob("*_0_log.err")):
        lines += path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    error = f": {lines[-1][:300]}" if lines else ""
    return f"job {job_id} ended in state {word}{error}"
