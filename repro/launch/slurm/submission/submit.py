"""`repro submit`: a suite becomes a few job arrays, or, with `--dry-run`, the text of their scripts."""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from repro.config import ConfigError
from repro.config.words import counted
from repro.launch.slurm.following.registry import Registry, Submission, Submitted
from repro.launch.slurm.following.states import Survey
from repro.launch.slurm.site import profile
from repro.launch.slurm.site.profile import Profile
from repro.launch.slurm.site.scheduler import Scheduler, SchedulerError
from repro.launch.slurm.submission import check, dryrun, script
from repro.launch.slurm.submission.intent import Intent, intend
from repro.results.store import Store
from repro.util import extras

PRIVATE = 0o077


def command(
    suite: Path,
    profile_file: Path,
    results: Path,
    only: list[str],
    exclude: str,
    dry: bool,
    move: bool,
    rerun: bool,
    json: bool,
) -> int:
    """Submit what the store lacks of `suite` and no live job is at.  Returns 0, or 1 if `sbatch` failed.

    `exclude`: nodes to keep away from, beside those of the profile, as `sbatch --exclude` writes them.
    Raises `ConfigError` before anything is submitted.  `dry`: the cluster is not asked at all.
    """
    site = profile.load(profile_file)
    if exclude:
        site = replace(site, slurm=replace(site.slurm, exclude=[*site.slurm.exclude, exclude]))
    results = results.absolute()
    check.folder(site, results)
    if dry:
        intent = intend(suite, site, Store(results), only=only, move=move, rerun=rerun)
        dryrun.show(intent, results, json=json)
        return 0
    if site.private:
        os.umask(PRIVATE)
    extras.require("slurm")
    registry, scheduler, store = Registry(results), Scheduler(), Store(results)
    check.writable(site, results)
    with registry.submitting():
        try:
            running = {} if rerun else Survey(registry, store, scheduler).live()
            intent = intend(suite, site, store, only=only, move=move, rerun=rerun, running=running)
            check.cluster(intent, scheduler)
        except SchedulerError as error:
            raise ConfigError(
                "--profile", str(profile_file), says=f"SLURM does not answer: {error}"
            ) from None
        if not intent.cases:
            _nothing(intent, json)
            return 0
        return _submit(intent, registry, store.newest, json)


def _submit(intent: Intent, registry: Registry, newest_record: int, json: bool) -> int:
    submission = _written(intent, registry, newest_record)
    folder = registry.path(submission)
    failure = ""
    for place, array in enumerate(intent.arrays):
        bundles = [bundle.index for bundle in array.bundles]
        name = submission.arrays[place].job_name
        wanted = script.parameters(array, intent.profile, name)
        try:
            job_id = submit_array(folder, bundles, wanted, intent.profile, array.shape.requeues)
        except SchedulerError as error:
            failure = str(error)
            break
        submission = submission.with_job(place, job_id)
        registry.write(submission)
        if not json:
            print(f"job {job_id}: {dryrun.line(array)}")
    document = {
        "submission": submission.id,
        "jobs": [a.job_id for a in submission.arrays if a.job_id],
        "cases": len(intent.cases),
        "failure": failure,
    }
    if json:
        print(jsonlib.dumps(document))
    else:
        dryrun.left_out(intent)
        cases = counted(len(intent.cases), "case")
        print(f"submitted {cases} as {submission.id}; `repro status` says how they are")
    if failure:
        print(f"error: sbatch failed, the rest was not submitted: {failure}", file=sys.stderr)
    return 1 if failure else 0


def submit_array(
    folder: Path, bundles: list[int], wanted: dict[str, object], site: Profile, requeues: int
) -> str:
    """Hand one array to submitit; SLURM's number of it.  Raises `SchedulerError`."""
    import submitit

    from repro.launch.slurm.allocation.entry import RunBundle

    executor = submitit.SlurmExecutor(
        folder / "submitit", max_num_timeout=requeues, python=script.python(site)
    )
    executor.update_parameters(**wanted)
    try:
        with executor.batch():  # of one it makes no array: SLURM's id then has no index
            jobs = [executor.submit(RunBundle(submission=str(folder), bundle=bundle)) for bundle in bundles]
    except (submitit.core.utils.FailedSubmissionError, submitit.core.utils.FailedJobError) as error:
        raise SchedulerError(" ".join(str(error).split())[:400]) from None
    return str(jobs[0].job_id).split("_")[0]


def _written(intent: Intent, registry: Registry, newest_record: int) -> Submission:
    """The submission's folder with everything that its jobs read."""
    identity = registry.new_id(intent.suite.name)
    arrays = [
        Submitted(
            bundles=[bundle.index for bundle in array.bundles],
            nodes=array.shape.nodes,
            tasks_per_node=array.shape.tasks_per_node,
            time_limit_s=array.shape.time_min * 60,
            partition=array.shape.partition,
            job_name=f"repro-{identity}-{place}",
        )
        for place, array in enumerate(intent.arrays)
    ]
    submission = Submission(
        id=identity,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        suite=intent.suite.name,
        suite_file=intent.suite.file,
        profile=intent.profile.file,
        system=intent.profile.system,
        newest_record=newest_record,
        arrays=arrays,
    )
    folder = registry.path(submission)
    folder.mkdir(parents=True)
    shutil.copyfile(intent.profile.file, folder / "profile.toml")
    intent.work().save(folder)
    registry.write(submission)
    return submission


def _nothing(intent: Intent, json: bool) -> None:
    if json:
        print(jsonlib.dumps({"submission": None, "jobs": [], "cases": 0, "failure": ""}))
        return
    dryrun.left_out(intent)
    print("nothing to submit")
