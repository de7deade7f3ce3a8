"""`repro cancel`: end the jobs of a suite, of some cases, or all."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from repro.config import ConfigError
from repro.config.words import counted
from repro.launch.slurm.following.logs import some
from repro.launch.slurm.following.registry import Registry
from repro.launch.slurm.following.states import PENDING, REQUEUED, RUNNING, Survey
from repro.launch.slurm.site.scheduler import Scheduler, SchedulerError
from repro.results.store import Store


def command(results: Path, what: str) -> int:
    """Cancel the live jobs of `what`: a suite's name or file, a submission, a case or a glob of cases; empty: all.

    A job whose other cases do not match goes too, and that is said: SLURM ends jobs, not cases.
    """
    registry, scheduler = Registry(results), Scheduler()
    if not registry.all():
        raise ConfigError("--results", str(results), "a folder that `repro submit` has used")
    try:
        open_cases = [
            case
            for case in Survey(registry, Store(results), scheduler).cases()
            if case.state in (PENDING, RUNNING, REQUEUED)
        ]
        files = {submission.id: submission.suite_file for submission in registry.all()}

        def matches(name: str, suite: str, submission: str) -> bool:
            return not what or what in (suite, submission, files[submission]) or fnmatchcase(name, what)

        chosen = [case for case in open_cases if matches(case.name, case.suite, case.submission)]
        if not chosen:
            known = some(what, [case.name for case in open_cases]) or "none"
            raise ConfigError("cancel", what, f"a suite, submission or case that waits or runs: {known}")
        jobs = list(dict.fromkeys(case.job for case in chosen))
        names = {case.name for case in chosen}
        for case in open_cases:
            if case.job in jobs and case.name not in names:
                print(f"{case.name} goes too: it shares job {case.job}")
        scheduler.cancel(jobs)
    except SchedulerError as error:
        raise ConfigError("SLURM", says=f"does not answer: {error}") from None
    what = f"{counted(len(jobs), 'job')} of {counted(len(names), 'case')}"
    print(f"cancelled {what}; `repro collect` records what they leave")
    return 0
