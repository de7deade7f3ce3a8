"""The plan of a submission: selected cases, job arrays and cases that are left out, and its output in a dry run."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro.config import ConfigError, Experiment, suites
from repro.config.suites import Entry, Suite
from repro.config.systems import LOCAL_SYSTEMS
from repro.config.words import count_noun
from repro.launch import plan
from repro.launch.plan import Task
from repro.launch.slurm.allocation.bundle import SubmissionWork
from repro.launch.slurm.profile import Profile
from repro.launch.slurm.scheduler import format_time_limit
from repro.launch.slurm.submission import job_array
from repro.launch.slurm.submission.job_array import JobArray, pack_arrays
from repro.results.metrics import STEP_SECONDS
from repro.results.schema import SIMULATED
from repro.results.select import by_key
from repro.results.store import Store
from repro.util import units

HOUR_S = 3600.0
_SUBMISSION_PLACEHOLDER = "SUBMISSION"
"""Placeholder for the name of a submission."""


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """Estimate of a case from its simulated record."""

    gpu_hours: float | None
    """GPU-hours of the steps; None without a step time."""
    outcome: str


@dataclass(frozen=True, kw_only=True)
class SubmissionPlan:
    """Submission before its first `sbatch`."""

    suite: Suite
    profile: Profile
    entries: tuple[Entry, ...]
    """Selected entries of the suite."""
    arrays: tuple[JobArray, ...]
    elsewhere: dict[str, str]
    """Requirements of experiments that this profile cannot run, by experiment name."""
    known: tuple[str, ...]
    """Names of experiments with a conclusive record in the store."""
    running: dict[str, str]
    """Jobs of experiments that an earlier submission runs, by experiment name."""
    predictions: dict[str, JobEstimate]
    rerun: bool

    @property
    def cases(self) -> list[Experiment]:
        """Return the experiments of all arrays."""
        return [e for array in self.arrays for bundle in array.bundles for e in bundle.experiments]

    def work(self) -> SubmissionWork:
        """Return the work file of the submission."""
        bundles = tuple(bundle for array in self.arrays for bundle in array.bundles)
        suite = replace(self.suite, entries=self.entries)
        return SubmissionWork(suite=suite, bundles=bundles, rerun=self.rerun)

    def gpu_hours(self) -> tuple[float, float, int]:
        """Return GPU-hours at the time limits, predicted GPU-hours, and the number of predicted cases.

        On processor cores, the unit is core-hours, one core per rank.
        """
        per_node = self.profile.slurm.gpus_per_node
        most = sum(array.node_hours() * (per_node or array.shape.tasks_per_node) for array in self.arrays)
        known = [self.predictions[e.name].gpu_hours for e in self.cases if e.name in self.predictions]
        times = [hours for hours in known if hours is not None]
        return most, sum(times), len(times)


def plan_submission(
    suite_file: Path,
    profile: Profile,
    store: Store,
    *,
    only: list[str],
    move: bool = False,
    rerun: bool = False,
    running: dict[str, str] | None = None,
) -> SubmissionPlan:
    """Return the plan of a suite's submission.

    With `move`, cases of other systems run on the profile's system under names of their own.  `running` maps keys of
    experiments of live jobs to the job.  Raises `ConfigError`.
    """
    suite = suites.load_suite(suite_file)
    entries = plan.select_entries(suite, only)
    if move:
        suite, entries = _moved(suite, entries, profile.system)
    elsewhere = {
        entry.experiment.name: _needs(entry.experiment)
        for entry in entries
        if entry.experiment.system != profile.system or entry.experiment.network is not None
    }
    here = [entry for entry in entries if entry.experiment.name not in elsewhere]
    if not here:
        first = next(iter(elsewhere))
        expected = f"its nodes are {profile.system}, and {first} of {suite.file} needs {elsewhere[first]}"
        first_system = suite.entry(first).experiment.system
        if not (move or first_system in LOCAL_SYSTEMS or any(entry.experiment.network for entry in entries)):
            expected += "; --move runs it on them all the same, under a name of its own"
        raise ConfigError("system", profile.system, says=expected, file=profile.file)
    tasks = plan.plan_tasks(suite, here, store, rerun=rerun)
    busy = running or {}
    live = {e.name: busy[e.key] for task in tasks for e in task.experiments if e.key in busy}
    tasks = [task for task in tasks if not any(e.name in live for e in task.experiments)]
    lacking = {e.name for task in tasks for e in task.experiments}
    names = [entry.experiment.name for entry in here]
    return SubmissionPlan(
        suite=suite,
        profile=profile,
        entries=tuple(entries),
        arrays=tuple(pack_arrays(tasks, profile)),
        elsewhere=elsewhere,
        known=tuple(name for name in names if name not in lacking and name not in live),
        running=live,
        predictions=_predictions(store, tasks),
        rerun=rerun,
    )


def _needs(experiment: Experiment) -> str:
    """Return the requirements of a case that the profile's nodes cannot run."""
    if experiment.network is not None:
        return "an emulated network, which `repro run` makes on one machine"
    return f"{experiment.layout.world} devices of system {experiment.system}"


def _moved(suite: Suite, entries: list[Entry], system: str) -> tuple[Suite, list[Entry]]:
    """Return suite and entries with the cases of other systems moved to `system`, in comparisons too."""
    from repro.launch.simulated import move_to_system

    if system in LOCAL_SYSTEMS:
        expected = "a profile of a system with GPUs: the published sizes are not for processor cores"
        raise ConfigError("--move", system, expected)
    result: list[Entry] = []
    names: dict[str, str] = {}
    for entry in entries:
        own = entry.experiment.system in (system, *LOCAL_SYSTEMS)
        new = entry if own else move_to_system([entry], system)[0]
        names[entry.experiment.name] = new.experiment.name
        result.append(new)
    comparisons = tuple(
        replace(c, baseline=names[c.baseline], subjects=tuple(names[s] for s in c.subjects if s in names))
        for c in suite.comparisons
        if c.baseline in names
    )
    return replace(suite, entries=tuple(result), comparisons=comparisons), result


def _predictions(store: Store, tasks: list[Task]) -> dict[str, JobEstimate]:
    wanted = {e.key: e for task in tasks for e in task.experiments}
    known = by_key(store.records(), SIMULATED)
    found: dict[str, JobEstimate] = {}
    for key, experiment in wanted.items():
        if (record := known.get(key)) is None or not record.conclusive:
            continue
        seconds, hours = record.metrics.get(STEP_SECONDS), None
        if seconds is not None and record.outcome == "ok":  # an experiment that does not fit ends at once
            hours = seconds * experiment.training.steps * experiment.layout.world / HOUR_S
        found[experiment.name] = JobEstimate(gpu_hours=hours, outcome=record.outcome)
    return found


def print_submission_plan(planned: SubmissionPlan, results: Path, *, json: bool) -> None:
    """Print the submission without submitting it."""
    if json:
        print(jsonlib.dumps(dry_run_document(planned, results)))
        return
    for place, array in enumerate(planned.arrays):
        print(f"# array {place}: {describe_array(array)}")
        for bundle in array.bundles:
            print(f"#   {', '.join(_case(planned, experiment) for experiment in bundle.experiments)}")
        print(_text(planned, results, place, array))
    print_left_out(planned)
    most, predicted, count = planned.gpu_hours()
    what = "GPU-hours" if planned.profile.slurm.gpus_per_node else "core-hours"
    print(
        f"{count_noun(len(planned.cases), 'case')} in {count_noun(len(planned.arrays), 'job array')};"
        f" at most {units.number(most)} {what}" + _price(planned, most)
    )
    if count:
        predicts = f"the time model predicts {units.number(predicted)} {what} of steps for {count} of them"
        print(predicts + _price(planned, predicted))
    elif planned.cases and planned.profile.slurm.gpus_per_node:
        print("no predicted times in the store: `repro run SUITE --evidence simulated` makes them")
    print("nothing was submitted (--dry-run)")


def dry_run_document(planned: SubmissionPlan, results: Path) -> dict[str, Any]:
    """Return the submission as plain JSON data."""
    most, predicted, count = planned.gpu_hours()
    return {
        "arrays": [
            {
                "nodes": array.shape.nodes,
                "tasks_per_node": array.shape.tasks_per_node,
                "time_limit_s": array.shape.time_min * 60,
                "partition": array.shape.partition,
                "bundles": [[e.name for e in bundle.experiments] for bundle in array.bundles],
                "script": _text(planned, results, place, array),
            }
            for place, array in enumerate(planned.arrays)
        ],
        "cases": [e.name for e in planned.cases],
        "gpu_hours": {"most": most, "predicted": predicted, "predicted_cases": count},
        "price": planned.profile.price_per_gpu_hour * most,
        "not_for_this_profile": planned.elsewhere,
        "known": list(planned.known),
        "running": planned.running,
        "predicted_out_of_memory": _too_large(planned),
    }


def describe_array(array: JobArray) -> str:
    """Return the description of an array, for people."""
    shape, count = array.shape, len(array.bundles)
    cases = sum(len(bundle.experiments) for bundle in array.bundles)
    size = f"{count_noun(shape.nodes, 'node')} x {count_noun(shape.tasks_per_node, 'rank')}"
    where = f", partition {shape.partition}" if shape.partition else ""
    limit = format_time_limit(shape.time_min)
    return f"{count_noun(cases, 'case')} in {count_noun(count, 'job')} of {size}, {limit} each{where}"


def print_left_out(planned: SubmissionPlan) -> None:
    """Print the cases that are not submitted, with the reasons."""
    for name, job in planned.running.items():
        print(f"{name}: job {job} is at it")
    if planned.known:
        print(f"{len(planned.known)} in the store already (--rerun runs them again)")
    if planned.elsewhere:
        first = next(iter(planned.elsewhere))
        print(
            f"{len(planned.elsewhere)} not for nodes of {planned.profile.system}: {first} needs"
            f" {planned.elsewhere[first]}" + (", ..." if len(planned.elsewhere) > 1 else "")
        )
    for name in _too_large(planned):
        print(f"{name}: simulated out of memory: it will not fit")


def _too_large(planned: SubmissionPlan) -> list[str]:
    """Return the cases that are predicted to run out of memory although the suite does not expect it."""
    expected = {entry.experiment.name for entry in planned.entries if entry.expect == "oom"}
    found = [name for name, estimate in planned.predictions.items() if estimate.outcome == "oom"]
    return [name for name in found if name not in expected]


def _case(planned: SubmissionPlan, experiment: Experiment) -> str:
    found = planned.predictions.get(experiment.name)
    if found is None or found.gpu_hours is None:
        return experiment.name
    return f"{experiment.name} ({units.number(found.gpu_hours)} GPU-hours)"


def _price(planned: SubmissionPlan, hours: float) -> str:
    price = planned.profile.price_per_gpu_hour
    return f", {price * hours:.2f} at {price:g} an hour" if price else ""


def _text(planned: SubmissionPlan, results: Path, place: int, array: JobArray) -> str:
    folder = results / "jobs" / _SUBMISSION_PLACEHOLDER / "submitit"
    return job_array.batch_script(array, planned.profile, f"repro-{_SUBMISSION_PLACEHOLDER}-{place}", folder)
