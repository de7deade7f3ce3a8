"""Simulated runs of suites (`repro run --evidence simulated`): worker processes simulate the experiments at full scale.

Simulated records do not replace measured records of the same key. Simulations of the local machine have no memory limit
except that of the experiment, so that their records do not depend on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from repro.config import Experiment, OperatorSet, systems
from repro.config.errors import ConfigError
from repro.config.suites import Entry, Suite
from repro.config.system import Device, Link, Quantity, System
from repro.launch.job import Interrupt
from repro.launch.local_launch import DEVICES
from repro.launch.plan import ExperimentLocks, retry_until_done
from repro.launch.progress import Progress
from repro.launch.rank.program import describe_error
from repro.launch.recorder import DiskFull, Recorder, RunEnd, disk_full_errors, run_end, summarise_run
from repro.measure.local_system import load_system
from repro.results.record_parts import SimulatedOn
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.results.select import by_key
from repro.results.store import Store
from repro.simulate.record import failed_record, simulated_record, simulation_facts
from repro.util.processes import WorkerDied, Workers, pause_garbage_collection


def simulate_suites(
    selected: Sequence[tuple[Suite, list[Entry]]], results: Path, system: str, rerun: bool
) -> Iterator[RunEnd]:
    """Simulate the experiments of each suite that have no record, and yield summary and exit code of each suite.

    `system`: simulate all experiments on this system.  Raises `ConfigError` before the first simulation.
    """
    if system:
        moves = [(suite, move_to_system(entries, system)) for suite, entries in selected]
        selected = [(replace(suite, entries=tuple(entries)), entries) for suite, entries in moves]
    prepared = [(suite, entries, *_prepare_systems(suite, entries)) for suite, entries in selected]
    with Workers() as workers, Store(results) as store:
        for suite, entries, on, missing in prepared:
            found = _simulate_suite(suite, entries, on, missing, store, rerun, workers)
            yield found
            if found.summary["stopped"]:
                return


def _prepare_systems(suite: Suite, entries: list[Entry]) -> tuple[dict[str, System], dict[str, str]]:
    """Return each experiment's system, and the missing requirement of its simulation, by name. Raises `ConfigError`."""
    experiments = [entry.experiment for entry in entries]
    missing = {experiment.name: missing_for_simulation(experiment) for experiment in experiments}
    if all(missing.values()):
        first = experiments[0].name
        place = f'{suite.file}: experiment "{first}"'
        raise ConfigError("not simulated", says=f"needs {missing[first]}", file=place)
    return {experiment.name: simulated_system(experiment) for experiment in experiments}, missing


def _simulate_suite(
    suite: Suite,
    entries: list[Entry],
    on: dict[str, System],
    missing: dict[str, str],
    store: Store,
    rerun: bool,
    workers: Workers,
) -> RunEnd:
    can = [entry for entry in entries if not missing[entry.experiment.name]]
    failure = ""
    with Interrupt() as interrupt:
        todo = missing_entries(can, store, on, rerun)
        ran = {entry.experiment.name for entry in todo}
        with Progress(total=len(todo), known=len(can) - len(todo)) as progress:
            recorder = Recorder(suite, store, progress, SIMULATED)
            try:
                recorder.adopt([entry for entry in can if entry not in todo])
                with _hold_simulation_lock(store, progress, interrupt) if todo else nullcontext():
                    left = todo if rerun else missing_entries(todo, store, on, rerun)
                    progress.elsewhere(len(todo) - len(left))
                    _simulate_entries(left, on, recorder, interrupt, workers)
            except (DiskFull, WorkerDied) as error:
                failure = str(error)
        summary = summarise_run(suite, entries, store, ran=ran, needs=missing, evidence=SIMULATED)
    return run_end(summary, failure=failure, signal=interrupt.signal)


def missing_for_simulation(experiment: Experiment) -> str:
    """Return the requirement without which `experiment` cannot be simulated; empty if it can be simulated."""
    needed = "engine = native: training steps of other engines cannot be simulated"
    return "" if experiment.engine == "native" else needed


def simulated_system(experiment: Experiment) -> System:
    """Return the system on which an experiment is simulated, with its emulated network.  Raises `ConfigError`."""
    if experiment.system in systems.LOCAL_SYSTEMS:
        return _unlimited_machine()
    system = systems.load_system_file(experiment.system)
    if experiment.network is None:
        return system
    from repro.simulate.time.emulated import emulated_system

    return emulated_system(system, experiment.network)


@pause_garbage_collection()  # Garbage collections would be slow, because a trace has many live objects.
def simulate_experiment(experiment: Experiment, system: System, suite: str) -> ExperimentRecord:
    """Simulate one experiment and return its record. An exception gives a record of the outcome `error`."""
    from repro.simulate.step import simulate

    began = time.perf_counter()
    try:
        limit = experiment.limits.memory_bytes or None
        gloo = DEVICES.get(experiment.system) == "cpu"  # Host buffers of gloo count as memory of a CPU rank.
        simulation = simulate(experiment, system, memory_limit=limit, gloo=gloo, time=True, interval=True)
    except Exception as error:  # A failed simulation must not end the run of the suite.
        spent_s = time.perf_counter() - began
        return failed_record(experiment, describe_error(error), suite=suite, wall_s=spent_s)
    spent_s = time.perf_counter() - began
    return simulated_record(experiment, simulation, system, suite=suite, wall_s=spent_s)


def _unlimited_machine() -> System:
    """Return a hardware description without memory size and rates, for simulations that are equal on all machines."""
    unknown = Quantity(value=None, source="left out, so that the record does not depend on the machine")
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
    """Return copies of a suite's entries (experiments) that run on `system`, with names such as `experiment@system`.

    A copy keeps its emulated network only if `system` describes processor cores that `repro calibrate` measured.
    """
    from repro.simulate.time.emulated import PROCESS_LINK

    loaded = load_system(system)
    is_emulated = PROCESS_LINK in loaded.links

    def move(experiment: Experiment) -> Experiment:
        name = f"{experiment.name}@{loaded.name}"
        network = experiment.network if is_emulated else None
        return replace(experiment, name=name, system=system, network=network)

    return [replace(entry, experiment=move(entry.experiment), expect="") for entry in entries]


def missing_entries(entries: list[Entry], store: Store, on: dict[str, System], rerun: bool) -> list[Entry]:
    """Return experiments without a simulated record, or simulated with other data of the system (`rerun`: all)."""
    latest = by_key(store.records(), SIMULATED)
    facts: dict[tuple[int, OperatorSet], SimulatedOn] = {}

    def known(experiment: Experiment) -> bool:
        record, system, kernels = latest.get(experiment.key), on[experiment.name], experiment.layout.kernels
        if record is None or not record.conclusive:
            return False
        if (id(system), kernels) not in facts:
            facts[id(system), kernels] = simulation_facts(system, kernels)
        return record.simulated_on == facts[id(system), kernels]

    return [entry for entry in entries if rerun or not known(entry.experiment)]


@contextmanager
def _hold_simulation_lock(store: Store, progress: Progress, interrupt: Interrupt) -> Iterator[None]:
    """Wait for the store's lock on simulations, and hold the lock inside the context.  Raises `DiskFull`."""
    locks = ExperimentLocks(store.root)
    with disk_full_errors(store.root):
        store.prepare()
        retry_until_done(
            lambda: locks.take([SIMULATED]),
            lambda: bool(interrupt),
            lambda: progress.say("waiting for another `repro run --evidence simulated` on this store"),
        )
    try:
        yield
    finally:
        locks.release()


def _simulate_entries(
    entries: list[Entry], on: dict[str, System], recorder: Recorder, interrupt: Interrupt, workers: Workers
) -> None:
    """Simulate experiments and write their records, until an interrupt. `on`: system of each experiment, by name."""
    if not entries or interrupt:
        return
    recorder.begin()
    experiments = {entry.experiment.name: entry.experiment for entry in entries}
    work = [(e, on[e.name], recorder.suite.name) for e in experiments.values()]
    for record in workers.completed(simulate_experiment, work):
        recorder.simulated(experiments[record.name], record)
        if interrupt:
            return
