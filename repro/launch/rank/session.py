"""The work of one rank of a job: join the process group, run the experiments, and return the results."""

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
"""Timeout of collectives. It never expires, because the launcher detects hangs earlier."""
TRIAL_STEPS = 2
"""Steps of a memory trial. The second step has every allocation of an ordinary step."""


@contextmanager
def joined_process_group(rank: int, world: int, device: torch.device, rendezvous: str) -> Iterator[None]:
    """Join the default process group of a job on `device` inside the context; a single process needs none.

    The group is destroyed after a success only. After a failure, NCCL would wait for collectives that peers never join.
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
    """Return the connected groups of this rank for one experiment; libraries connect their own groups."""
    layout = experiment.layout
    mesh = meshes.single_rank_mesh() if layout.world == 1 else meshes.distributed_mesh(layout, device.type)
    if device.type != "cuda" or experiment.engine != NATIVE:
        return mesh
    return replace(mesh, beside_torch=connect_communicators(mesh, device))


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Run the job's experiments on this rank and return a `RankResult` per experiment key.

    Compared experiments take turns in rounds (A B A B ...), so that disturbances of the machine affect both. Others run
    one after another.  Compared `apart`, each turn initialises its experiment.
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
    """Runs of a job's experiments on one rank, each named by its index in the job."""

    job: Job
    device: torch.device
    heartbeat: HeartbeatWriter
    network: EmulatedNetworkRank | None

    def _mesh(self, index: int) -> Mesh:
        """Return this rank's groups for one experiment. Each collective is throttled and reported to the heartbeat."""
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
            # The caching allocator still holds memory of the experiment before.
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
        """Report the end of an experiment with its result, and return the result."""
        self.heartbeat.phase(index, self.job.experiments[index].training.steps, Phase.DONE)
        self.heartbeat.finished(index, result)
        return result

    def run_one(self, index: int) -> dict[str, Any]:
        """Run one experiment to its end and return its result."""
        run = self._start(index)
        diverged = _advance(run, None) or _advance(run, run.left)
        return self._finish(index, run.result(diverged).as_dict())

    def run_compared(self) -> dict[str, dict[str, Any]]:
        """Run compared experiments, which are all on the device, in turns; return the results by key."""
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
        """Return the number of timed steps of a turn; the last round takes the remainder."""
        training, rounds = self.job.experiments[index].training, self.job.rounds
        timed = training.steps - training.untimed_steps
        return timed // rounds + (timed % rounds if turn == rounds - 1 else 0)

    def run_compared_apart(self) -> dict[str, dict[str, Any]]:
        """Run compared experiments that do not fit the device together: each turn initialises and frees its experiment.

        Losses and memory are those of the last turn; times are those of all turns. The groups remain over all turns.
        """
        job = self.job
        meshes = [self._mesh(i) for i in range(len(job.experiments))]
        rounds: list[list[list[float]]] = [[] for _ in meshes]
        rows: list[list[dict[str, float]]] = [[] for _ in meshes]
        results: dict[str, dict[str, Any]] = {}
        for experiment in job.experiments:
            import_libraries(experiment.engine, self.device.type)
        gc.freeze()  # collections below skip the imported modules, an eighth of their time
        for turn in range(job.rounds):
            for i, experiment in enumerate(job.experiments):
                if experiment.key in results:
                    continue  # diverged
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
    """Run `steps` timed steps, or with None the untimed steps. Return the reason of a divergence, or ''."""
    try:
        run.prelude() if steps is None else run.steps(steps)
    except Diverged as error:
        return str(error)
    return ""


def run_memory_trial(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Run the memory trial of the job's experiment on this rank; return `{"memory", "parameters"}` by key, in bytes.

    This is the target of `repro fit --measure`. A trial consists of initialisation and two training steps; the model
    states are those after the first step. With `job.as_rank`, the process allocates the memory of that rank of the
    layout, and its collectives have no data.
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
        # As in a trace: memory is that of all micro-batches after a few of them.
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
        # As in a run: tokens and targets of a step, and on a GPU those of the next one (`step_data`).
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
