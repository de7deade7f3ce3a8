"""`repro run`: bring the store to where it holds a conclusive record of every selected experiment."""

from __future__ import annotations

from pathlib import Path

from repro import suites
from repro.config import ConfigError, Experiment
from repro.launch import plan, simulated
from repro.launch.interrupt import Interrupt
from repro.launch.local import launch
from repro.launch.progress import Progress
from repro.launch.recorder import DiskFull, Recorder
from repro.launch.runner import LocalLauncher, Runner
from repro.launch.summary import Ended, ended, summarise
from repro.results.schema import MEASURED, SIMULATED
from repro.results.store import Store


def run(
    suite: Path, only: list[str], results: Path, rerun: bool, evidence: str = MEASURED, system: str = ""
) -> Ended:
    """Run what the store lacks of `suite`.

    Experiments that need more than this machine are listed and not started.
    `evidence` simulated: nothing is started, and all of it can be had here, see `.simulated`.
    Raises `ConfigError` before anything is started.
    """
    loaded = suites.load(suite)
    if evidence not in (MEASURED, SIMULATED):
        raise ConfigError("--evidence", evidence, f"{MEASURED} or {SIMULATED}")
    entries = plan.select(loaded, only)
    if evidence == SIMULATED:
        return simulated.run(loaded, entries, results, system, rerun)
    if system:
        raise ConfigError(
            "--system", system, f"--evidence {SIMULATED}; measured runs use the machine at hand"
        )
    needs = {entry.experiment.name: _needs(entry.experiment) for entry in entries}
    here = [entry for entry in entries if not needs[entry.experiment.name]]
    if not here:
        raise _nothing_here(loaded, entries, needs)
    failure = ""
    with Store(results) as store, Interrupt() as interrupt:
        tasks = plan.tasks(loaded, here, store, rerun=rerun)
        todo = {experiment.name for task in tasks for experiment in task.experiments}
        with Progress(total=len(todo), known=len(here) - len(todo)) as progress:
            recorder = Recorder(loaded, store, progress)
            try:
                recorder.adopt(entries)
                Runner(recorder, progress, interrupt, LocalLauncher(results), rerun=rerun).run(tasks)
            except DiskFull as error:
                failure = str(error)
        summary = summarise(loaded, entries, store, ran=todo, needs=needs)
    return ended(summary, failure=failure, signal=interrupt.signal)


def _needs(experiment: Experiment) -> str:
    """What keeps `experiment` from being measured on this machine, and that it can be simulated instead."""
    needs = launch.needs(experiment)
    hint = f"; `--evidence {SIMULATED}` traces it here" if not simulated.needs(experiment) else ""
    return needs and needs + hint


def _nothing_here(suite: suites.Suite, entries: list[suites.Entry], needs: dict[str, str]) -> ConfigError:
    """That nothing of what was selected can run on this machine: in one line, however much it is."""
    first = entries[0].experiment
    place = f'{suite.file}: experiment "{first.name}"'
    if len(entries) > 1:
        place = f'{suite.file}: {len(entries)} experiments, the first of them "{first.name}"'
    return ConfigError("not run", expected=f"needs {needs[first.name]}", file=place)
