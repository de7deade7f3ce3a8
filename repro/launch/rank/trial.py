"""A trial: does an experiment's step fit the memory of this rank's device?  The target of `repro fit --measure`.

Initialisation and two steps run as they would in training; the second has everything that an ordinary step has.
As one rank of many (`job.as_rank`) the process allocates what that rank of the layout would and computes its
share; messages carry nothing, so the numbers mean nothing and only memory and outcome are handed in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from repro.config import Experiment
from repro.config.enums import Phase
from repro.engines.native.engine import NativeEngine
from repro.engines.native.part import MicroBatch
from repro.launch.beacon import Beacon
from repro.launch.job import Job
from repro.launch.rank.device import own_device
from repro.launch.rank.experiment import process_memory
from repro.launch.rank.session import mesh_of, process_group
from repro.model.gpt import Place
from repro.parallel import mesh as meshes
from repro.simulate.trace.roles import shortened

TARGET = f"{__name__}:run_rank"
STEPS = 2


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, beacon: Beacon
) -> dict[str, dict[str, Any]]:
    """Try the job's experiments on this rank; `{"memory", "parameters"}` per experiment key, in bytes."""
    place = own_device(device)
    found = {}
    with process_group(rank, world, place, rendezvous):
        for index, experiment in enumerate(job.experiments):
            found[experiment.key] = _try(experiment, job.as_rank, index, place, beacon)
    return found


def _try(
    experiment: Experiment, as_rank: int, index: int, device: torch.device, beacon: Beacon
) -> dict[str, Any]:
    if as_rank >= 0:
        mesh = meshes.shape_only(experiment.layout, as_rank)
        # As in a trace: memory is that of all micro-batches after a few of them.
        experiment = replace(experiment, layout=shortened(experiment.layout, mesh.pp.rank))
        mesh = meshes.shape_only(experiment.layout, as_rank)
    else:
        mesh = mesh_of(experiment, device)
    mesh.ledger.observers.append(lambda sequence, op, group, purpose: beacon.collective(sequence, op, group))
    beacon.phase(index, 0, Phase.INIT)
    engine = NativeEngine(experiment, mesh, device)
    layout, step = experiment.layout, 0
    tokens = torch.randint(experiment.model.vocab, (layout.micro_batch, experiment.seq), device=device)
    for step in range(STEPS):
        batches = [MicroBatch(tokens, tokens, Place(step, k)) for k in range(layout.accumulation)]
        engine.step(batches, lambda phase, step=step: beacon.phase(index, step, phase))  # type: ignore[misc]
        engine.synchronize()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    beacon.phase(index, STEPS, Phase.DONE)
    return {"memory": process_memory(device, mesh).as_dict(), "parameters": engine.local_parameters()}
