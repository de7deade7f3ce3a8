"""Functions with which a rank joins the process group, runs the experiments of its job, and returns the results."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from repro.config import Experiment
from repro.config.engines import NATIVE
from repro.config.enums import MODEL_STATES, Phase
from repro.engines import import_libraries
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.launch.job import Job
from repro.launch.rank.checkpoints import CheckpointPlace
from repro.launch.rank.device_settings import rank_device
from repro.launch.rank.emulated_network import EmulatedNetworkRank
from repro.launch.rank.experiment import ExperimentRun, process_memory
from repro.launch.rank.step_data import Diverged
from repro.launch.rank_process import HeartbeatWriter
from repro.measure.memory import MemoryTracker
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel.mesh import Mesh, connect_communicators
from repro.results.record_parts import RankMemory
from repro.simulate.trace.roles import shortened

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Timeout of collectives, which is so long that the launcher always detects a hang before a collective fails."""
TRIAL_STEPS = 2
"""Number of steps in a trial run that measures memory. The second step makes every allocation of later steps."""


@contextmanager
def joined_process_group(rank: int, world: int, device: torch.device, rendezvous: str) -> Iterator[None]:
    """Join the default process group of `world` ranks inside the context; a single rank needs no group.

    After a failure the group is not destroyed, because NCCL would wait for collectives that peers never join.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
    )
    yield
    dist.destroy_process_group()


def make_mesh(experiment: Experiment, device: torch.device) -> Mesh:
    """Return this rank's process groups; for this package's own engine, connect their CUDA communicators at once."""
    layout = experiment.layout
    mesh = meshes.single_rank_mesh() if layout.world == 1 else meshes.distributed_mesh(layout, device.type)
    if device.type != "cuda" or experiment.engine != NATIVE:
        return mesh
    return replace(mesh, beside_torch=connect_communicators(mesh, device))


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Run the job's experiments on this rank and return a `RankResult` as JSON data for each experiment key.

    Compared experiments take turns in rounds (A B A B ...), so that disturbances of the machine affect all of them.
    Other experiments run one after another.
    """
    place = rank_device(device)
    with (
        joined_process_group(rank, world, place, rendezvous),
        EmulatedNetworkRank.throttled(job, rank) as network,
    ):
        session = RankSession(job, place, heartbeat, network)
        if job.compare:
            return session.run_compared_apart() if job.apart else session.run_compared()
        return {experiment.key: session.run_one(index) for index, experiment in enumerate(job.experiments)}


@dataclass(frozen=True)
class RankSession:
    """Runs the experiments of a job on one rank. Methods select an experiment by its index in the job."""

    job: Job
    device: torch.device
    heartbeat: HeartbeatWriter
    network: EmulatedNetworkRank | None

    def _mesh(self, index: int) -> Mesh:
        """Return this rank's process groups for one experiment, which write every collective to the heartbeat file."""
        mesh = make_mesh(self.job.experiments[index], self.device)
        if self.network is not None:
            throttle = self.network.throttle
            mesh.ledger.observers.append(lambda *_: throttle.settle())
        mesh.ledger.observers.append(self.heartbeat.collective)
        return mesh

    def _start(self, index: int, mesh: Mesh | None = None, *, watched: bool = True) -> ExperimentRun:
        def report(step: int, phase: Phase) -> None:
            if self.network is not None:
                self.network.throttle.settle()
            self.heartbeat.phase(index, step, phase)

        experiment, mesh = self.job.experiments[index], mesh or self._mesh(index)
        if self.device.type == "cuda":
            # The allocator's cache is emptied, because it still holds memory of the previous experiment.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        place = None if self.job.apart else CheckpointPlace.for_experiment(self.job, experiment)
        name = f"{experiment.name}-{experiment.key}"
        profiles = Path(self.job.profiles) / name if self.job.profiles and watched else None
        return ExperimentRun(
            experiment, mesh, self.device, report, place, self.network, watched=watched, profiles=profiles
        )

    def _finish(self, index: int, result: dict[str, Any]) -> dict[str, Any]:
        """Report to the launcher that an experiment ended with `result`, and return `result`."""
        self.heartbeat.phase(index, self.job.experiments[index].training.steps, Phase.DONE)
        self.heartbeat.finished(index, result)
        return result

    def run_one(self, index: int) -> dict[str, Any]:
        """Run one experiment to its end and return its result as JSON data."""
        run = self._start(index)
        diverged = _advance(run, None) or _advance(run, run.left)
        return self._finish(index, run.result(diverged).as_dict())

    def run_compared(self) -> dict[str, dict[str, Any]]:
        """Run compared experiments in turns, with all experiments in device memory; return results by their keys."""
        runs = [self._start(i) for i in range(len(self.job.experiments))]
        diverged = [_advance(run, None) for run in runs]
        for turn in range(self.job.rounds):
            for i, run in enumerate(runs):
                diverged[i] = diverged[i] or _advance(run, self._timed_steps(i, turn))
        return {
            run.experiment.key: self._finish(i, run.result(diverged[i]).as_dict())
            for i, run in enumerate(runs)
        }

    def _timed_steps(self, index: int, turn: int) -> int:
        """Return an experiment's number of timed steps in round `turn` of a comparison; the last gets the remainder."""
        training, rounds = self.job.experiments[index].training, self.job.rounds
        timed = training.steps - training.untimed_steps
        return timed // rounds + (timed % rounds if turn == rounds - 1 else 0)

    def run_compared_apart(self) -> dict[str, dict[str, Any]]:
        """Run compared experiments in turns that each initialise and free one experiment; return the results by key.

        The device holds one experiment at a time. Losses and memory are from the last turn, times from all turns.
        """
        job = self.job
        meshes = [self._mesh(i) for i in range(len(job.experiments))]
        rounds: list[list[list[float]]] = [[] for _ in meshes]
        rows: list[list[dict[str, float]]] = [[] for _ in meshes]
        results: dict[str, dict[str, Any]] = {}
        for experiment in job.experiments:
            import_libraries(experiment.engine, self.device.type)
        gc.freeze()  # Garbage collections are faster if they skip the objects of imported modules.
        for turn in range(job.rounds):
            for i, experiment in enumerate(job.experiments):
                if experiment.key in results:
                    continue  # The experiment's loss diverged in an earlier turn, so it is not run again.
                run = self._start(i, meshes[i], watched=turn == job.rounds - 1)
                diverged = _advance(run, None) or _advance(run, self._timed_steps(i, turn))
                run.rounds, run.phase_rows = rounds[i] + run.rounds, rows[i] + run.phase_rows
                rounds[i], rows[i] = run.rounds, run.phase_rows
                if diverged or turn == job.rounds - 1:
                    results[experiment.key] = run.result(diverged).as_dict()
                del run
                gc.collect()
        return {e.key: self._finish(i, results[e.key]) for i, e in enumerate(job.experiments)}


def _advance(run: ExperimentRun, steps: int | None) -> str:
    """Run `steps` timed steps (None: the untimed steps), and return the reason of a divergence, or an empty text."""
    try:
        run.prelude() if steps is None else run.steps(steps)
    except Diverged as error:
        return str(error)
    return ""


def run_memory_trial(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Run a memory trial for `repro fit --measure` on this rank: initialisation and two steps of one experiment.

    Return by experiment key the `memory` in bytes, with model states after the first step, and the number of
    `parameters`. With `job.as_rank`, a single process allocates the memory of this rank, and collectives carry no data.
    """
    place, [experiment] = rank_device(device), job.experiments
    with joined_process_group(rank, world, place, rendezvous):
        return {experiment.key: _run_trial(experiment, job.as_rank, place, heartbeat, MemoryTracker())}


def _run_trial(
    experiment: Experiment,
    as_rank: int,
    device: torch.device,
    heartbeat: HeartbeatWriter,
    tracker: MemoryTracker,
) -> dict[str, Any]:
    inputs = 2, experiment.layout.replica_batch, experiment.seq
    if as_rank >= 0:
        # A trial of one rank runs only a few micro-batches, because further ones would not raise its peak memory.
        stage = experiment.layout.index_of("pp", as_rank)
        experiment = replace(experiment, layout=shortened(experiment.layout, stage))
        mesh = meshes.shape_only_mesh(experiment.layout, as_rank)
    else:
        mesh = make_mesh(experiment, device)
    mesh.ledger.observers.append(heartbeat.collective)
    heartbeat.phase(0, 0, Phase.INIT)
    layout, vocab = experiment.layout, experiment.model.vocab
    with tracker:
        engine = NativeEngine(experiment, mesh, device)
        # As in training, a GPU holds the tokens and targets of the current step and of the next step (`step_data`).
        steps = [torch.randint(vocab, inputs, device=device) for _ in range(1 if device.type == "cpu" else 2)]
    tokens, targets = steps[0][:, : layout.micro_batch]
    for step in range(TRIAL_STEPS):
        batches = [MicroBatch(tokens, targets, BatchPosition(step, k)) for k in range(layout.accumulation)]
        with tracker if step == 0 else nullcontext():
            engine.step(batches, lambda phase, step=step: heartbeat.phase(0, step, phase))  # type: ignore[misc]
            engine.synchronize()
        if step == 0:
            live = tracker.live()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    heartbeat.phase(0, TRIAL_STEPS, Phase.DONE)
    states = RankMemory(states={part: live[part] for part in MODEL_STATES})
    memory = process_memory(states, device, mesh)
    return {"memory": memory.as_dict(), "parameters": engine.local_parameters()}
