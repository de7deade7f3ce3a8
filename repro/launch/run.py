"""Implementation of `repro run`: runs or previews experiments of suites without an `ok`, `oom` or `diverged` record."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.config import ConfigError, Experiment, require, words
from repro.config.suites import Entry, Suite, load_suite
from repro.config.systems import LOCAL_SYSTEMS
from repro.config.systems import load_system_file as load_system
from repro.launch import local_launch, plan, simulated
from repro.launch.job import Interrupt
from repro.launch.local_launch import DEVICES
from repro.launch.progress import Progress
from repro.launch.recorder import DiskFull, Recorder, RunEnd, run_end, summarise_run
from repro.launch.runner import Runner, local_launcher
from repro.results.schema import MEASURED, SIMULATED, ExperimentRecord
from repro.results.select import by_key
from repro.results.store import Store
from repro.simulate.plan.closed_form import stage_parameters, state_bytes
from repro.util import units

TO_RUN, KNOWN, ELSEWHERE = "to run", "in the store", "not here"
"""States of an experiment in a run's preview: it will run, it has a record, or it needs another machine."""


def run_suites(
    suites: Sequence[Path],
    only: list[str],
    results: Path,
    rerun: bool,
    evidence: str = MEASURED,
    system: str = "",
    profile: bool = False,
) -> Iterator[RunEnd]:
    """Run the experiments without a record, and yield each suite's summary and exit code, until a signal ends the run.

    `evidence`: `measured` (experiments that need another machine are only listed) or `simulated`. `profile`: run
    all experiments again, and write a profile of each rank.  Raises `ConfigError` before the first start.
    """
    if profile and evidence == SIMULATED:
        right = "this option needs measured runs; `repro simulate --timeline --snapshot` profiles a predicted step"
        raise ConfigError("--profile", evidence, says=right)
    selected = [(suite, plan.select_entries(suite, only)) for suite in load_suites(suites, evidence, system)]
    _require_writable(results)
    if evidence == SIMULATED:
        yield from simulated.simulate_suites(selected, results, system, rerun)
        return
    missing = [_missing_requirements(suite, entries) for suite, entries in selected]
    for (suite, entries), needs in zip(selected, missing, strict=True):
        found = _run_measured(suite, entries, needs, results, rerun or profile, profile)
        yield found
        if found.summary["stopped"]:
            return


def load_suites(files: Sequence[Path], evidence: str, system: str) -> list[Suite]:
    """Load suites.  Raises `ConfigError` if two have one name, or if measured runs have a `system` to simulate."""
    require(evidence in (MEASURED, SIMULATED), "--evidence", evidence, f"{MEASURED} or {SIMULATED}")
    if system and evidence == MEASURED:
        right = f"this option needs --evidence {SIMULATED}; measured runs use this machine"
        raise ConfigError("--system", system, says=right)
    found: dict[str, Suite] = {}
    for suite in map(load_suite, files):
        if suite.name in found:
            right = f"a name that no other suite of this run has; {found[suite.name].file} has this name too"
            raise ConfigError("suite.name", suite.name, right, file=suite.file)
        found[suite.name] = suite
    return list(found.values())


def _require_writable(results: Path) -> None:
    """Raise `ConfigError` unless the folder `results`, or its nearest existing parent, is writable."""
    there = next(folder for folder in (results, *results.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        right = f"a writable folder ({error.strerror}: {there})"
        raise ConfigError("--results", str(results), right) from None


def _run_measured(
    suite: Suite, entries: list[Entry], needs: dict[str, str], results: Path, rerun: bool, profile: bool
) -> RunEnd:
    here = [entry for entry in entries if not needs[entry.experiment.name]]
    failure = ""
    with Store(results) as store, Interrupt() as interrupt:
        tasks = plan.plan_tasks(suite, here, store, rerun=rerun)
        todo = {experiment.name for task in tasks for experiment in task.experiments}
        with Progress(total=len(todo), known=len(here) - len(todo)) as progress:
            recorder = Recorder(suite, store, progress)
            try:
                recorder.adopt(entries)
                launcher = local_launcher(results)
                Runner(recorder, progress, interrupt, launcher, rerun=rerun, profile=profile).run(tasks)
            except DiskFull as error:
                failure = str(error)
        summary = summarise_run(suite, entries, store, ran=todo, needs=needs)
    return run_end(summary, failure=failure, signal=interrupt.signal)


def _missing_requirements(suite: Suite, entries: list[Entry]) -> dict[str, str]:
    """Return the missing requirement of each experiment, by name.  Raises `ConfigError` if no experiment can run."""
    needs = {entry.experiment.name: missing_for_measurement(entry) for entry in entries}
    if all(needs.values()):
        first = entries[0].experiment.name
        count = f"{len(entries)} experiments, of which the first is" if len(entries) > 1 else "experiment"
        raise ConfigError("not run", says=f"needs {needs[first]}", file=f'{suite.file}: {count} "{first}"')
    return needs


def missing_for_measurement(entry: Entry) -> str:
    """Return the requirement that this machine lacks to run an experiment, with a hint to simulate; empty if none.

    Too little memory does not count for an experiment that is expected to run out of memory.
    """
    experiment = entry.experiment
    needs = local_launch.missing_resource(experiment)
    if not needs and local_launch.DEVICES[experiment.system] == "cpu" and entry.expect != "oom":
        needs = local_launch.memory_shortage(experiment)
    if needs and not simulated.missing_for_simulation(experiment):
        return f"{needs}; `--evidence {SIMULATED}` simulates the experiment here"
    return needs


@dataclass(frozen=True)
class ExperimentPreview:
    """One line of the preview that `repro run --dry-run` prints: an experiment and whether it will run."""

    suite: str
    name: str
    state: str
    """State: `to run`, `in the store` (the experiment has a record) or `not here` (it needs another machine)."""
    where: str
    """Number and type of the devices that run the experiment, or the requirement that this machine does not meet."""
    steps: int
    """Number of training steps of the experiment."""
    last_s: float | None
    """Duration of the experiment in its newest record, in seconds; None without a record."""
    limit_s: float
    """Timeout of the experiment, in seconds; 0 disables the timeout."""
    memory: str = ""
    """Memory that each device needs and whether it fits, for a system other than this machine; else empty."""


def preview_run(
    suites: Sequence[Path], only: list[str], results: Path, rerun: bool, evidence: str, system: str
) -> list[ExperimentPreview]:
    """Return a preview of every selected experiment, in the order of the suites.  Raises `ConfigError`."""
    store, simulates = Store(results), evidence == SIMULATED
    found: list[ExperimentPreview] = []
    records = (r for r in store.records() if isinstance(r, ExperimentRecord) and r.evidence == evidence)
    took = {(record.suite, record.name): record.wall_s for record in records if record.wall_s}
    traced = by_key(store.records(), SIMULATED)
    for suite in load_suites(suites, evidence, system):
        entries = plan.select_entries(suite, only)
        if system:
            entries = simulated.move_to_system(entries, system)
        needs = {
            e.experiment.name: simulated.missing_for_simulation(e.experiment)
            if simulates
            else missing_for_measurement(e)
            for e in entries
        }
        here = [entry for entry in entries if not needs[entry.experiment.name]]
        if simulates:
            on = {entry.experiment.name: simulated.simulated_system(entry.experiment) for entry in here}
            todo = {entry.experiment.name for entry in simulated.missing_entries(here, store, on, rerun)}
        else:
            tasks = plan.plan_tasks(suite, here, store, rerun=rerun)
            todo = {experiment.name for task in tasks for experiment in task.experiments}
        for entry in entries:
            experiment, name = entry.experiment, entry.experiment.name
            lacking = needs[name]
            if lacking:
                state, where = ELSEWHERE, f"needs {lacking}"
            else:
                state = TO_RUN if name in todo else KNOWN
                where = _describe_ranks(experiment, simulates)
            found.append(
                ExperimentPreview(
                    suite.name,
                    name,
                    state,
                    where,
                    steps=1 if simulates else experiment.training.steps,
                    last_s=None if lacking else took.get((suite.name, name)),
                    limit_s=0.0 if simulates else experiment.limits.timeout_s,
                    memory="" if simulates and lacking else _describe_memory(experiment, traced),
                )
            )
    return found


def _describe_ranks(experiment: Experiment, simulates: bool) -> str:
    if simulates:
        ranks = words.count_noun(experiment.layout.world, "rank")
        return f"simulation of {ranks} on system {experiment.system}"
    what = "rank" if DEVICES[experiment.system] == "cpu" else "GPU"
    ranks = words.count_noun(experiment.layout.world, what)
    return f"{ranks} here, {experiment.network}" if experiment.network is not None else f"{ranks} here"


def _describe_memory(experiment: Experiment, traced: dict[str, ExperimentRecord]) -> str:
    """Describe the simulated peak memory of a device; if none is recorded, the model-state bytes (a lower bound)."""
    if experiment.system in LOCAL_SYSTEMS:
        return ""
    system = load_system(experiment.system)
    known = system.device.memory_bytes.value is not None
    limit = system.allocatable_bytes() if known else None
    of = "of device memory whose size is not published" if limit is None else f"of {units.size(limit)}"
    record = traced.get(experiment.key)
    if record is not None and "memory.peak_bytes" in record.metrics:
        reserved = record.metrics.get("memory.reserved_bytes", record.metrics["memory.peak_bytes"])
        fits = "" if limit is None else ": fits" if record.outcome == "ok" else ": does not fit"
        return f"{units.size(reserved)} {of}, simulated{fits}"
    fullest = max(stage_parameters(experiment.model, experiment.layout).values())
    states = sum(state_bytes(fullest, experiment.layout).values())
    fits = "" if limit is None or states <= limit else ": does not fit"
    return f"states {units.size(states)} {of}{fits}"
