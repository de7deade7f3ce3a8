"""What a rank does of an evaluation: its replica's samples, through its part of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from repro.config import Experiment
from repro.config.enums import Phase
from repro.launch.job import Job
from repro.launch.rank.device_settings import rank_device
from repro.launch.rank.session import joined_process_group, make_mesh
from repro.launch.rank_process import HeartbeatWriter
from repro.parallel.mesh import Mesh
from repro.quality.evaluate.scorer import Scorer, Scores
from repro.quality.evaluate.texts import Samples
from repro.quality.weights.formats import open_weights
from repro.quality.weights.source import WeightSource

TARGET = f"{__name__}:run_rank"
Row = tuple[int, float, bool, bool]
"""Of a sample: its number, the sum of its losses, whether all its predictions are right, and without stop words."""


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Score on this rank what `job.task` names; `{"samples"}` by experiment key, empty but on one rank a replica."""
    place, experiment = rank_device(device), job.experiments[0]
    heartbeat.phase(0, 0, Phase.INIT)
    with joined_process_group(rank, world, place, rendezvous):
        mesh = make_mesh(experiment, place)
        mesh.ledger.observers.append(
            lambda sequence, op, group, purpose: heartbeat.collective(sequence, op, group)
        )
        source = open_weights(Path(job.task["weights"]), experiment.model)
        samples = Samples.load(Path(job.task["samples"]))
        forbidden = job.task["forbidden"]
        progress: Callable[[int], None] = lambda step: heartbeat.phase(0, step, Phase.FORWARD)
        rows = score(experiment, mesh, place, source, samples, forbidden, progress)
    heartbeat.phase(0, 0, Phase.DONE)
    return {experiment.key: {"samples": rows}}


def score(
    experiment: Experiment,
    mesh: Mesh,
    device: torch.device,
    source: WeightSource,
    samples: Samples,
    forbidden: list[int],
    progress: Callable[[int], None] = lambda step: None,
) -> list[Row]:
    """Rows of this replica's samples, on the first tp rank of the last stage; on others none."""
    layout = experiment.layout
    scorer = Scorer(experiment.model, layout, mesh, device, source, forbidden)
    mine = range(mesh.dp.rank, len(samples.spans), layout.dp)
    # All replicas make as many passes: under stage 3 they gather together.
    share = -(-len(samples.spans) // layout.dp)
    rows: list[Row] = []
    for step, start in enumerate(range(0, share, layout.micro_batch)):
        progress(step)
        numbers = list(mine[start : start + layout.micro_batch])
        tokens, targets, counts = batch(samples, numbers, layout.micro_batch)
        found = scorer.score(tokens.to(device), targets.to(device), counts.to(device))
        if found is not None and mesh.tp.rank == 0:
            rows += _rows(numbers, samples, found, targets[counts])
    scorer.finish()
    return rows


def batch(samples: Samples, numbers: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and which of these count, each [size, longest], of these samples; what is missing is padding.

    Of no samples one target counts, which nobody reads: a pass without any would leave others waiting.
    """
    tokens = torch.zeros(size, samples.longest + 1, dtype=torch.int64)
    counts = torch.zeros(size, samples.longest, dtype=torch.bool)
    counts[0, 0] = not numbers
    for row, number in enumerate(numbers):
        begin, length, scored = map(int, samples.spans[number])
        tokens[row, :length] = torch.from_numpy(samples.tokens[begin : begin + length])
        counts[row, length - 1 - scored : length - 1] = True
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), counts


def _rows(numbers: list[int], samples: Samples, found: Scores, targets: torch.Tensor) -> list[Row]:
    if not numbers:
        return []
    lengths = [int(samples.spans[number][2]) for number in numbers]
    right, allowed = found.predicted.cpu() == targets, found.allowed.cpu() == targets
    parts = zip(*(t.split(lengths) for t in (found.loss.cpu().double(), right, allowed)), strict=True)
    return [
        (number, float(loss.sum()), bool(one.all()), bool(other.all()))
        for number, (loss, one, other) in zip(numbers, parts, strict=True)
    ]
