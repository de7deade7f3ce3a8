"""What one rank of a job does: join the others, run the experiments, hand in what was seen."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from repro.config import Experiment
from repro.config.engines import NATIVE
from repro.config.enums import Phase
from repro.engines import load
from repro.launch.beacon import Beacon
from repro.launch.job import Job
from repro.launch.rank.checkpoints import CheckpointPlace
from repro.launch.rank.device import own_device
from repro.launch.rank.experiment import Diverged, Run
from repro.launch.rank.on_network import OnNetwork
from repro.parallel import mesh as meshes
from repro.parallel.mesh import Mesh, connect_communicators

__all__ = ["Diverged", "run_rank"]

NEVER = timedelta(days=7)
"""Collectives do not time out by themselves: the launcher sees a hang sooner and says where it is."""


@contextmanager
def process_group(rank: int, world: int, device: torch.device, rendezvous: str) -> Iterator[None]:
    """The default process group of a job, on this rank's own `device`; one process needs none.

    It is destroyed on a clean end only: with NCCL that waits for collectives that a failed rank's peers never join,
    and a rank whose process ends is out of them too.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=NEVER)
    yield
    dist.destroy_process_group()


def mesh_of(experiment: Experiment, device: torch.device) -> Mesh:
    """This rank's groups for one experiment, connected; engines that are libraries connect groups of their own."""
    layout = experiment.layout
    mesh = meshes.single() if layout.world == 1 else meshes.distributed(layout, device.type)
    if device.type != "cuda" or experiment.engine != NATIVE:
        return mesh
    return replace(mesh, beside_torch=connect_communicators(mesh, device))


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, beacon: Beacon
) -> dict[str, dict[str, Any]]:
    """Run the job's experiments on this rank; a `RankResult` per experiment key.

    Compared experiments take turns in rounds (A B A B ...), so that what disturbs the machine disturbs
    both; others run one after the other.  Compared `apart`, each turn builds its experiment anew.
    """
    place = own_device(device)
    with process_group(rank, world, place, rendezvous), OnNetwork.of(job, rank) as network:
        if job.compare:
            return (_compare_apart if job.apart else _compare)(job, place, beacon, network)
        results = {}
        for index, experiment in enumerate(job.experiments):
            results[experiment.key] = _alone(job, index, place, beacon, network)
        return results


def _joined(experiment: Experiment, device: torch.device, beacon: Beacon, network: OnNetwork | None) -> Mesh:
    """This rank's groups for one experiment: the beacon hears of each collective, before which a rank is throttled."""
    mesh = mesh_of(experiment, device)
    if network is not None:
        mesh.ledger.observers.append(lambda *_: network.throttle.settle())
    mesh.ledger.observers.append(lambda sequence, op, group, purpose: beacon.collective(sequence, op, group))
    return mesh


def _start(
    job: Job,
    index: int,
    device: torch.device,
    beacon: Beacon,
    network: OnNetwork | None,
    mesh: Mesh | None = None,
    *,
    watched: bool = True,
) -> Run:
    experiment = job.experiments[index]
    mesh = mesh or _joined(experiment, device, beacon, network)

    def report(step: int, phase: Phase) -> None:
        if network is not None:
            network.throttle.settle()
        beacon.phase(index, step, phase)

    if device.type == "cuda":
        # What an earlier experiment has left with the caching allocator is not this one's.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    place = None if job.apart else CheckpointPlace.of(job, experiment)
    return Run(experiment, mesh, device, report, place, network, watched=watched)


def _alone(
    job: Job, index: int, device: torch.device, beacon: Beacon, network: OnNetwork | None
) -> dict[str, Any]:
    run = _start(job, index, device, beacon, network)
    try:
        run.prelude()
        run.steps(run.left)
    except Diverged as error:
        result = run.result("diverged", str(error)).as_dict()
    else:
        result = run.result().as_dict()
    beacon.phase(index, run.experiment.training.steps, Phase.DONE)
    beacon.finished(index, result)
    return result


def _compare(
    job: Job, device: torch.device, beacon: Beacon, network: OnNetwork | None
) -> dict[str, dict[str, Any]]:
    runs = [_start(job, i, device, beacon, network) for i in range(len(job.experiments))]
    diverged: dict[int, str] = {}

    def attempt(i: int, steps: int | None) -> None:
        if i in diverged:
            return
        try:
            runs[i].prelude() if steps is None else runs[i].steps(steps)
        except Diverged as error:
            diverged[i] = str(error)

    for i in range(len(runs)):
        attempt(i, None)
    for turn in range(job.rounds):
        for i, experiment in enumerate(job.experiments):
            attempt(i, _steps_of(job, experiment, turn))
    results = {}
    for i, (run, experiment) in enumerate(zip(runs, job.experiments, strict=True)):
        result = (run.result("diverged", diverged[i]) if i in diverged else run.result()).as_dict()
        beacon.phase(i, experiment.training.steps, Phase.DONE)
        beacon.finished(i, result)
        results[experiment.key] = result
    return results


def _steps_of(job: Job, experiment: Experiment, turn: int) -> int:
    """Timed steps of a turn: rounds are equal but for the last, which takes what does not divide."""
    timed = experiment.training.steps - experiment.training.untimed_steps
    return timed // job.rounds + (timed % job.rounds if turn == job.rounds - 1 else 0)


def _compare_apart(
    job: Job, device: torch.device, beacon: Beacon, network: OnNetwork | None
) -> dict[str, dict[str, Any]]:
    """Turns of which each begins at the first step, with its untimed steps, and leaves nothing but its times.

    Of experiments whose states fill a device, two cannot take turns and both stay.  Losses and memory are those
    of the last turn, times those of all; the groups stay, since making them again would cost every turn.
    """
    meshes = [_joined(experiment, device, beacon, network) for experiment in job.experiments]
    rounds: list[list[list[float]]] = [[] for _ in meshes]
    rows: list[list[dict[str, float]]] = [[] for _ in meshes]
    results: dict[str, dict[str, Any]] = {}
    for experiment in job.experiments:
        load(experiment.engine, device.type)
    gc.freeze()  # what was imported, which each collection below would look through: an eighth of the time
    for turn in range(job.rounds):
        for i, experiment in enumerate(job.experiments):
            if experiment.key in results:
                continue  # it has diverged
            run = _start(job, i, device, beacon, network, meshes[i], watched=turn == job.rounds - 1)
            diverged = ""
            try:
                run.prelude()
                run.steps(_steps_of(job, experiment, turn))
            except Diverged as error:
                diverged = str(error)
            run.rounds, run.phase_rows = rounds[i] + run.rounds, rows[i] + run.phase_rows
            rounds[i], rows[i] = run.rounds, run.phase_rows
            if diverged or turn == job.rounds - 1:
                results[experiment.key] = run.result("diverged" if diverged else "ok", diverged).as_dict()
            del run
            gc.collect()
    for i, experiment in enumerate(job.experiments):
        beacon.phase(i, experiment.training.steps, Phase.DONE)
        beacon.finished(i, results[experiment.key])
    return results
