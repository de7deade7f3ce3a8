"""What `repro submit` would do, before anything is asked of the cluster: cases, arrays, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from repro.config import ConfigError, Experiment, suites
from repro.config.suites import Entry, Suite
from repro.config.systems import HERE
from repro.launch import plan
from repro.launch.plan import Task
from repro.launch.slurm.allocation.work import SubmissionWork
from repro.launch.slurm.site.profile import Profile
from repro.launch.slurm.submission.pack import Array, arrays
from repro.results.metrics import STEP_SECONDS
from repro.results.schema import SIMULATED
from repro.results.select import by_key
from repro.results.store import Store

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """What the store's simulated record says of a case."""

    gpu_hours: float | None
    """GPU-hours of its steps; None where there is no time."""
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A submission that has not been submitted."""

    suite: Suite
    profile: Profile
    entries: tuple[Entry, ...]
    """What was selected."""
    arrays: tuple[Array, ...]
    elsewhere: dict[str, str]
    """Of what this profile is not for: experiment name -> what it needs."""
    known: tuple[str, ...]
    """Names that the store has a conclusive record of."""
    running: dict[str, str]
    """Names that an earlier submission is at -> its job."""
    predictions: dict[str, JobEstimate]
    rerun: bool

    @property
    def cases(self) -> list[Experiment]:
        """Every experiment that would run."""
        return [e for array in self.arrays for bundle in array.bundles for e in bundle.experiments]

    def work(self) -> SubmissionWork:
        """What the allocations have to know."""
        bundles = tuple(bundle for array in self.arrays for bundle in array.bundles)
        return SubmissionWork(
            suite=replace(self.suite, entries=self.entries), bundles=bundles, rerun=self.rerun
        )

    def gpu_hours(self) -> tuple[float, float, int]:
        """GPU-hours if every job takes its whole time limit; predicted ones; how many cases those are of.

        On processor cores: core-hours, one for each rank.
        """
        per_node = self.profile.gpus_per_node
        most = sum(array.node_hours() * (per_node or array.shape.tasks_per_node) for array in self.arrays)
        known = [self.predictions[e.name].gpu_hours for e in self.cases if e.name in self.predictions]
        times = [hours for hours in known if hours is not None]
        return most, sum(times), len(times)


def intend(
    suite_file: Path,
    profile: Profile,
    store: Store,
    *,
    only: list[str],
    move: bool = False,
    rerun: bool = False,
    running: dict[str, str] | None = None,
) -> Intent:
    """What is to be submitted of a suite.

    `move`: cases of other systems are run on the profile's, under names of their own.  `running`: keys of
    experiments that live jobs are at, with the job's name.  Raises `ConfigError`.
    """
    suite = suites.load(suite_file)
    entries = plan.select(suite, only)
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
        if not (move or first_system in HERE or any(entry.experiment.network for entry in entries)):
            expected += "; --move runs it on them all the same, under a name of its own"
        raise ConfigError("system", profile.system, says=expected, file=profile.file)
    tasks = plan.tasks(suite, here, store, rerun=rerun)
    busy = running or {}
    live = {e.name: busy[e.key] for task in tasks for e in task.experiments if e.key in busy}
    tasks = [task for task in tasks if not any(e.name in live for e in task.experiments)]
    lacking = {e.name for task in tasks for e in task.experiments}
    names = [entry.experiment.name for entry in here]
    return Intent(
        suite=suite,
        profile=profile,
        entries=tuple(entries),
        arrays=tuple(arrays(tasks, profile)),
        elsewhere=elsewhere,
        known=tuple(name for name in names if name not in lacking and name not in live),
        running=live,
        predictions=_predictions(store, tasks),
        rerun=rerun,
    )


def _needs(experiment: Experiment) -> str:
    """What a case that is not for the profile's nodes runs on."""
    if experiment.network is not None:
        return "an emulated network, which `repro run` makes on one machine"
    return f"{experiment.layout.world} devices of system {experiment.system}"


def _moved(suite: Suite, entries: list[Entry], system: str) -> tuple[Suite, list[Entry]]:
    """The entries of other systems on this one; comparisons go by names, so both sides move."""
    from repro.launch.simulated import move_to_system

    if system in HERE:
        expected = "a profile of a system with GPUs: the published sizes are not for processor cores"
        raise ConfigError("--move", system, expected)
    result: list[Entry] = []
    names: dict[str, str] = {}
    for entry in entries:
        own = entry.experiment.system in (system, *HERE)
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
    found: dict[str, JobEstimate] = {}
    for key, record in by_key(store.records(), SIMULATED).items():
        if key not in wanted or not record.conclusive:
            continue
        experiment = wanted[key]
        seconds = record.metrics.get(STEP_SECONDS)
        hours = None
        if seconds is not None and record.outcome == "ok":  # what does not fit ends at once
            hours = seconds * experiment.training.steps * experiment.layout.world / HOUR_S
        found[experiment.name] = JobEstimate(gpu_hours=hours, outcome=record.outcome)
    return found
