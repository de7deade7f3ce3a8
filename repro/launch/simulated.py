"""`repro run --evidence simulated`: trace every selected experiment at its own scale, on this machine.

Nothing but a few worker processes is started, an experiment each at a time, and every one takes seconds:
see `repro.simulate`.  The records are of their own kind, and the measured ones of a key stay as they
are.  An experiment of the machine at hand (`local`) is simulated without a limit on memory but its own, so
that the record does not depend on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from repro.config import Experiment, systems
from repro.config.errors import ConfigError
from repro.config.suites import Entry, Suite
from repro.config.system import Device, Link, Quantity, System
from repro.launch.job import Interrupt
from repro.launch.progress import Progress
from repro.launch.rank.program import describe_error
from repro.launch.recorder import DiskFull, Recorder
from repro.launch.runner import ExperimentLocks
from repro.launch.summary import RunEnd, run_end, summarise
from repro.measure.local_system import load_system
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.results.select import by_key
from repro.results.store import DISK_FULL, Store
from repro.simulate.record import failed_record, simulated_record, simulation_facts
from repro.util.workers import WorkerDied, Workers

LOCK_RETRY_INTERVAL_S = 0.5
"""How often the store is tried again that another `repro run` is simulating for."""


def run(
    selected: Sequence[tuple[Suite, list[Entry]]], results: Path, system: str, rerun: bool
) -> Iterator[RunEnd]:
    """Simulate what the store lacks of the entries of each suite, on the same worker processes.

    `system`: simulate all of them on this one.  Raises `ConfigError` before anything is simulated.
    """
    if system:
        moves = [(suite, move_to_system(entries, system)) for suite, entries in selected]
        selected = [(replace(suite, entries=tuple(entries)), entries) for suite, entries in moves]
    prepared = [(suite, entries, *_prepared(suite, entries)) for suite, entries in selected]
    with Workers() as workers:
        for suite, entries, on, missing in prepared:
            found = _run(suite, entries, on, missing, results, rerun, workers)
            yield found
            if found.summary["stopped"]:
                return


def _prepared(suite: Suite, entries: list[Entry]) -> tuple[dict[str, System], dict[str, str]]:
    """By name the system of each experiment, and what each lacks.  `ConfigError` if none can be simulated."""
    experiments = [entry.experiment for entry in entries]
    missing = {experiment.name: needs(experiment) for experiment in experiments}
    if all(missing.values()):
        first = experiments[0].name
        place = f'{suite.file}: experiment "{first}"'
        raise ConfigError("not simulated", says=f"needs {missing[first]}", file=place)
    return {experiment.name: system_of(experiment) for experiment in experiments}, missing


def _run(
    suite: Suite,
    entries: list[Entry],
    on: dict[str, System],
    missing: dict[str, str],
    results: Path,
    rerun: bool,
    workers: Workers,
) -> RunEnd:
    can = [entry for entry in entries if not missing[entry.experiment.name]]
    failure = ""
    with Store(results) as store, Interrupt() as interrupt:
        todo = missing_entries(can, store, on, rerun)
        ran = {entry.experiment.name for entry in todo}
        with Progress(total=len(todo), known=len(can) - len(todo)) as progress:
            recorder = Recorder(suite, store, progress, SIMULATED)
            try:
                recorder.adopt([entry for entry in can if entry not in todo])
                with _alone(store, progress, interrupt, bool(todo)):
                    left = todo if rerun else missing_entries(todo, store, on, rerun)
                    progress.elsewhere(len(todo) - len(left))
                    _simulate(left, on, recorder, interrupt, workers)
            except (DiskFull, WorkerDied) as error:
                failure = str(error)
        summary = summarise(suite, entries, store, ran=ran, needs=missing, evidence=SIMULATED)
    return run_end(summary, failure=failure, signal=interrupt.signal)


def needs(experiment: Experiment) -> str:
    """What `experiment` would need to be simulated; empty if it can be."""
    return "" if experiment.engine == "native" else "engine native: only the suite's own step can be traced"


def system_of(experiment: Experiment) -> System:
    """The system that `experiment` is simulated on, its network included.  Raises `ConfigError`."""
    if experiment.system in systems.LOCAL_SYSTEMS:
        return _anywhere()
    system = systems.load_system_file(experiment.system)
    if experiment.network is None:
        return system
    from repro.simulate.time.emulated import emulated_system

    return emulated_system(system, experiment.network)


def attempt(experiment: Experiment, system: System, suite: str) -> ExperimentRecord:
    """Simulate one experiment; its record, whatever happens."""
    from repro.simulate.step import simulate
    from repro.simulate.time.predict import with_curves

    began = time.perf_counter()
    try:
        limit = experiment.limits.memory_bytes or None
        here = experiment.network is not None  # where gloo's messages have buffers of their own
        simulation = simulate(experiment, system, memory_limit=limit, gloo=here, time=True, interval=True)
        if simulation.time is not None:
            simulation = replace(simulation, time=with_curves(simulation.time))
    except Exception as error:  # an outcome, not the end of the suite
        return failed_record(
            experiment, describe_error(error), suite=suite, wall_s=time.perf_counter() - began
        )
    spent_s = time.perf_counter() - began
    return simulated_record(experiment, simulation, system, suite=suite, wall_s=spent_s)


def _anywhere() -> System:
    """One machine whose processes share memory without end, for experiments of the machine at hand."""
    unknown = Quantity(value=None, source="not asked: the record must not depend on the machine")
    return System(
        name="local",
        device=Device(name="any", memory_bytes=unknown, memory_bandwidth=unknown),
        devices_per_node=Quantity(value=1, source="one machine"),
        nodes=Quantity(value=1, source="one machine"),
        context_bytes=Quantity(value=0, source="left out"),
        host_memory_bytes=unknown,
        links={"memory": Link(per="node", bandwidth=unknown)},
    )


def move_to_system(entries: list[Entry], system: str) -> list[Entry]:
    """`entries` on another system, under names that no claim mistakes for the suite's own.

    A file of `repro calibrate` for processors is this machine, whose links are emulated there too; any other has links.
    """
    from repro.simulate.time.emulated import PROCESS_LINK

    loaded = load_system(system)
    of_ours = PROCESS_LINK in loaded.links

    def move(experiment: Experiment) -> Experiment:
        name = f"{experiment.name}@{loaded.name}"
        return replace(experiment, name=name, system=system, network=experiment.network if of_ours else None)

    return [replace(entry, experiment=move(entry.experiment), expect="") for entry in entries]


def missing_entries(entries: list[Entry], store: Store, on: dict[str, System], rerun: bool) -> list[Entry]:
    """Entries without a conclusive record of today's system."""
    latest = by_key(store.records(), SIMULATED)

    def known(experiment: Experiment) -> bool:
        record = latest.get(experiment.key)
        if record is None or not record.conclusive:
            return False
        return record.simulated_on == simulation_facts(on[experiment.name], experiment.layout.kernels)

    return [entry for entry in entries if rerun or not known(entry.experiment)]


@contextmanager
def _alone(store: Store, progress: Progress, interrupt: Interrupt, needed: bool) -> Iterator[None]:
    """Hold the store's lock on simulations, which are too short to be shared out.  Raises `DiskFull`."""
    if not needed:
        yield
        return
    locks = ExperimentLocks(store.root)
    told = False
    try:
        store.prepare()
        while not locks.take([SIMULATED]):
            if interrupt:
                break
            if not told:
                progress.say("waiting for another `repro run --evidence simulated` on this store")
                told = True
            time.sleep(LOCK_RETRY_INTERVAL_S)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise DiskFull(f"disk full: {error.filename or store.root}") from None
    try:
        yield
    finally:
        locks.release()


def _simulate(
    entries: list[Entry], on: dict[str, System], recorder: Recorder, interrupt: Interrupt, workers: Workers
) -> None:
    """Simulate and record `entries`, until done or interrupted."""
    if not entries or interrupt:
        return
    recorder.begin()
    experiments = {entry.experiment.name: entry.experiment for entry in entries}
    work = [(e, on[e.name], recorder.suite.name) for e in experiments.values()]
    for record in workers.completed(attempt, work):
        recorder.simulated(experiments[record.name], record)
        if interrupt:
            return
