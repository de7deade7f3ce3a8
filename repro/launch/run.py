"""`repro run`: bring the store to where it holds a conclusive record of every selected experiment of suites."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from repro.config import ConfigError
from repro.config.suites import Entry, Suite, load_suite
from repro.launch import local_capacity, plan, simulated
from repro.launch.job import Interrupt
from repro.launch.progress import Progress
from repro.launch.recorder import DiskFull, Recorder
from repro.launch.runner import LocalLauncher, Runner
from repro.launch.summary import RunEnd, run_end, summarise
from repro.results.schema import MEASURED, SIMULATED
from repro.results.store import Store


def run(
    suites: Sequence[Path],
    only: list[str],
    results: Path,
    rerun: bool,
    evidence: str = MEASURED,
    system: str = "",
) -> Iterator[RunEnd]:
    """Run what the store lacks of `suites`, one after the other, to the first that is interrupted.

    Experiments that need more than this machine are listed and not started.
    `evidence` simulated: nothing is started, and all of it can be had here, see `.simulated`.
    Raises `ConfigError` before anything is started.
    """
    selected = [(suite, plan.select(suite, only)) for suite in load_suites(suites, evidence, system)]
    _writable(results)
    if evidence == SIMULATED:
        yield from simulated.run(selected, results, system, rerun)
        return
    runnable = [_runnable(suite, entries) for suite, entries in selected]
    for (suite, entries), (here, needs) in zip(selected, runnable, strict=True):
        found = _measured(suite, entries, here, needs, results, rerun)
        yield found
        if found.summary["stopped"]:
            return


def load_suites(files: Sequence[Path], evidence: str, system: str) -> list[Suite]:
    """The suites in `files`, each with a name of its own.  Raises `ConfigError`."""
    if evidence not in (MEASURED, SIMULATED):
        raise ConfigError("--evidence", evidence, f"{MEASURED} or {SIMULATED}")
    if system and evidence == MEASURED:
        right = f"needs --evidence {SIMULATED}; measured runs use the machine at hand"
        raise ConfigError("--system", system, says=right)
    found: dict[str, Suite] = {}
    for suite in map(load_suite, files):
        if suite.name in found:
            right = f"a name that no other suite of this run has, as {found[suite.name].file} has it"
            raise ConfigError("suite.name", suite.name, right, file=suite.file)
        found[suite.name] = suite
    return list(found.values())


def _writable(results: Path) -> None:
    """Raise `ConfigError` unless a folder of this name takes files, or can be made.  Nothing is left there."""
    there = next(folder for folder in (results, *results.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        right = f"a folder that can be written ({error.strerror}: {there})"
        raise ConfigError("--results", str(results), right) from None


def _measured(
    suite: Suite, entries: list[Entry], here: list[Entry], needs: dict[str, str], results: Path, rerun: bool
) -> RunEnd:
    failure = ""
    with Store(results) as store, Interrupt() as interrupt:
        tasks = plan.tasks(suite, here, store, rerun=rerun)
        todo = {experiment.name for task in tasks for experiment in task.experiments}
        with Progress(total=len(todo), known=len(here) - len(todo)) as progress:
            recorder = Recorder(suite, store, progress)
            try:
                recorder.adopt(entries)
                Runner(recorder, progress, interrupt, LocalLauncher(results), rerun=rerun).run(tasks)
            except DiskFull as error:
                failure = str(error)
        summary = summarise(suite, entries, store, ran=todo, needs=needs)
    return run_end(summary, failure=failure, signal=interrupt.signal)


def _runnable(suite: Suite, entries: list[Entry]) -> tuple[list[Entry], dict[str, str]]:
    """What this machine can run of `entries`, and by name what each lacks.  `ConfigError` if it can run nothing."""
    needs = {entry.experiment.name: missing_requirement(entry) for entry in entries}
    here = [entry for entry in entries if not needs[entry.experiment.name]]
    if not here:
        raise _nothing_here(suite, entries, needs)
    return here, needs


def missing_requirement(entry: Entry) -> str:
    """What keeps an experiment from being measured on this machine, and that it can be simulated instead.

    What is to run out of memory is started, however large it is: that it does is its result.
    """
    experiment = entry.experiment
    needs = local_capacity.missing_requirement(experiment)
    if not needs and local_capacity.DEVICES[experiment.system] == "cpu" and entry.expect != "oom":
        needs = local_capacity.memory_shortage(experiment)
    hint = f"; `--evidence {SIMULATED}` traces it here" if not simulated.needs(experiment) else ""
    return needs and needs + hint


def _nothing_here(suite: Suite, entries: list[Entry], needs: dict[str, str]) -> ConfigError:
    """That nothing of what was selected can run on this machine: in one line, however much it is."""
    first = entries[0].experiment
    place = f'{suite.file}: experiment "{first.name}"'
    if len(entries) > 1:
        place = f'{suite.file}: {len(entries)} experiments, the first of them "{first.name}"'
    return ConfigError("not run", says=f"needs {needs[first.name]}", file=place)
