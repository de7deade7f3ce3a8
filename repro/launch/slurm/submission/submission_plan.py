"""Plan of a submission to SLURM: its job arrays, the experiments that are left out, and the output of a dry run."""

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
from repro.util.console import new_table, print_page

HOUR_S = 3600.0
_SUBMISSION_PLACEHOLDER = "SUBMISSION"
"""Text that a dry run prints in place of the submission's id, which does not exist yet."""
MAX_ARRAYS, MAX_LISTED_CASES = 12, 3
"""Maximum number of job arrays that a dry run prints without `--details`, and of experiment names in one line."""


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """Predicted GPU-hours and outcome of an experiment, from its simulated record."""

    gpu_hours: float | None
    """GPU-hours of all training steps; None if the record has no step time or the training runs out of memory."""
    outcome: str


@dataclass(frozen=True, kw_only=True)
class SubmissionPlan:
    """Job arrays that `repro submit` will submit, and the experiments that it leaves out."""

    suite: Suite
    profile: Profile
    entries: tuple[Entry, ...]
    """Experiments of the suite, with expected outcomes, that the option `--only` selects."""
    arrays: tuple[JobArray, ...]
    elsewhere: dict[str, str]
    """Requirement that the nodes of the profile do not meet, by name of the experiment that has the requirement."""
    known: tuple[str, ...]
    """Names of experiments that are left out because the store has their outcome `ok`, `oom` or `diverged`."""
    running: dict[str, str]
    """Ids of waiting or running jobs of an earlier submission, by the name of the experiment that they run."""
    predictions: dict[str, JobEstimate]
    rerun: bool
    """Whether experiments with a record are submitted again."""

    @property
    def cases(self) -> list[Experiment]:
        return [e for array in self.arrays for bundle in array.bundles for e in bundle.experiments]

    def work(self) -> SubmissionWork:
        """Return the content of `work.json`, from which the SLURM jobs read their experiments."""
        bundles = tuple(bundle for array in self.arrays for bundle in array.bundles)
        suite = replace(self.suite, entries=self.entries)
        return SubmissionWork(suite=suite, bundles=bundles, rerun=self.rerun)

    def gpu_hours(self) -> tuple[float, float, int]:
        """Return GPU-hours if all jobs reach their time limits, predicted GPU-hours, and number of predictions.

        Without GPUs, the unit is core-hours with one core per rank.
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
    """Return the plan to submit the experiments of a suite that match `only`.  Raises `ConfigError` if none can run.

    `move`: run experiments of other systems on the profile's system, under new names.  `running`: ids of waiting or
    running jobs by the key of the experiment that they run.
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
        first = suite.entry(next(iter(elsewhere))).experiment
        expected = f"the system runs no selected case of {suite.file}: case {first.name} needs {elsewhere[first.name]}"
        if first.network is None and first.system in LOCAL_SYSTEMS:
            expected += f". --move cannot move cases of system {first.system}. " * move or ". "
            expected += f"Use a profile of system {first.system}, or `repro run {suite.file}` on one machine"
        elif first.network is None and not move:
            expected += f". --move runs {first.name} on {profile.system} as {first.name}@{profile.system}"
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
    """Return the requirement of an experiment that the profile's nodes do not meet."""
    if experiment.network is not None:
        return "an emulated network, which only `repro run` provides"
    return f"{count_noun(experiment.layout.world, 'device')} of system {experiment.system}"


def _moved(suite: Suite, entries: list[Entry], system: str) -> tuple[Suite, list[Entry]]:
    """Return copies of a suite and its experiments in which the experiments of other systems run on `system`."""
    from repro.launch.simulated import move_to_system

    if system in LOCAL_SYSTEMS:
        expected = "a profile of a system with GPUs, because processor cores cannot run published model sizes"
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
        # An experiment that is predicted to run out of memory gets no estimate of GPU hours.
        if seconds is not None and record.outcome == "ok":
            hours = seconds * experiment.training.steps * experiment.layout.world / HOUR_S
        found[experiment.name] = JobEstimate(gpu_hours=hours, outcome=record.outcome)
    return found


def print_submission_plan(planned: SubmissionPlan, results: Path, *, json: bool, details: bool) -> None:
    """Print the plan of a submission; with `details`, also the experiments and the script of each job array."""
    if json:
        print(jsonlib.dumps(dry_run_document(planned, results)))
        return
    most, predicted, count = planned.gpu_hours()
    what = "GPU-hours" if planned.profile.slurm.gpus_per_node else "core-hours"
    cases, arrays = count_noun(len(planned.cases), "case"), count_noun(len(planned.arrays), "job array")
    print(f"Dry run: {cases} in {arrays}. Nothing is submitted.")
    limit = f"{units.number(most)} {what}{_price(planned, most)}"
    print(f"Maximum cost, if all jobs reach their time limits: {limit}.")
    if count:
        price = _price(planned, predicted)
        steps = f"the training steps of {count_noun(count, 'case')}"
        print(f"Predicted cost of {steps}: {units.number(predicted)} {what}{price}.")
    elif planned.cases and planned.profile.slurm.gpus_per_node:
        print("No step time is predicted: run `repro run SUITE --evidence simulated` first.")
    print_left_out(planned)
    if not details:
        rows = [(str(place), describe_array(array)) for place, array in enumerate(planned.arrays)]
        hidden = f"{max(0, len(rows) - MAX_ARRAYS)} more arrays; --details prints the cases and scripts of all arrays"
        print_page(new_table("array", "jobs", left=2, rows=rows[:MAX_ARRAYS]), hidden)
        return
    for place, array in enumerate(planned.arrays):
        print(f"# array {place}: {describe_array(array)}")
        for bundle in array.bundles:
            print(f"#   {', '.join(_case(planned, experiment) for experiment in bundle.experiments)}")
        print(_text(planned, results, place, array))


def dry_run_document(planned: SubmissionPlan, results: Path) -> dict[str, Any]:
    """Return the plan of a submission as JSON data, for `repro submit --dry-run --json`."""
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
    """Return a line that describes a job array: number of experiments, jobs and nodes, time limit, partition."""
    shape, count = array.shape, len(array.bundles)
    cases = sum(len(bundle.experiments) for bundle in array.bundles)
    size = f"{count_noun(shape.nodes, 'node')} x {count_noun(shape.tasks_per_node, 'rank')}"
    where = f", partition {shape.partition}" if shape.partition else ""
    limit = format_time_limit(shape.time_min)
    return f"{count_noun(cases, 'case')} in {count_noun(count, 'job')} of {size}, time limit {limit}{where}"


def print_left_out(planned: SubmissionPlan) -> None:
    """Print how many experiments are not submitted, by reason, and how many are predicted to run out of memory."""
    live = [f"{name} (job {job})" for name, job in planned.running.items()]
    other = [f"{name} needs {needs}" for name, needs in planned.elsewhere.items()]
    for cases, what, shown in (
        (live, "in a live job", MAX_LISTED_CASES),
        (planned.known, "with a record; --rerun submits cases with a record again", 0),
        (other, f"that nodes of {planned.profile.system} cannot run", 1),
        (_too_large(planned), "predicted to run out of memory", MAX_LISTED_CASES),
    ):
        if cases:
            names = ", ".join(cases[:shown]) + ", ..." * (0 < shown < len(cases))
            print(f"{count_noun(len(cases), 'case')} {what}{': ' * bool(shown)}{names}")


def _too_large(planned: SubmissionPlan) -> list[str]:
    """Return the names of experiments with a predicted, but not expected, out-of-memory failure."""
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
    return f", {price * hours:.2f} at {price:g} per GPU-hour" if price else ""


def _text(planned: SubmissionPlan, results: Path, place: int, array: JobArray) -> str:
    folder = results / "jobs" / _SUBMISSION_PLACEHOLDER / "submitit"
    return job_array.batch_script(array, planned.profile, f"repro-{_SUBMISSION_PLACEHOLDER}-{place}", folder)
