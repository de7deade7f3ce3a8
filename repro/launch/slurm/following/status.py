"""Where every submitted case stands."""

from __future__ import annotations

from repro.launch.slurm.following.registry import Registry
from repro.launch.slurm.following.states import DONE, PENDING, REQUEUED, RUNNING, CaseState, Survey
from repro.launch.slurm.site.scheduler import Scheduler
from repro.results.store import Store


def read(registry: Registry, store: Store, every: bool) -> tuple[list[CaseState], list[str]]:
    """States of the cases, and what the site could not tell.

    Of a case that was submitted more than once the last submission counts, unless `every`.  Raises
    `SchedulerError`.
    """
    scheduler = Scheduler()
    cases = Survey(registry, store, scheduler).cases()
    if not every:
        cases = list({case.key: case for case in cases}.values())
    return cases, list(dict.fromkeys(scheduler.warnings))


def code(cases: list[CaseState]) -> int:
    """The command's exit code."""
    states = {case.state for case in cases}
    if states & {PENDING, RUNNING, REQUEUED}:
        return 3
    return 1 if states - {DONE} else 0
