"""Functions that ranks run in tests of scores, without the slow import of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from repro.config import Experiment, Layout, Model
from repro.measure.memory import MemoryTracker
from repro.parallel import mesh as meshes
from repro.quality.evaluate import rank as ranks_part
from repro.quality.evaluate.rank import Scorer
from repro.quality.evaluate.samples import Samples, split_windows
from repro.quality.weights import open_weights
from tests.quality.weights.reference_weights import SEQ, VOCAB, tokens

STRIDE, LENGTH = 5, 40
FORBIDDEN = list(range(0, VOCAB, 2))


def padded(model: Model, layout: Layout) -> Model:
    return replace(model, vocab=-(-model.vocab // layout.tp) * layout.tp)


def place(layout: Layout) -> tuple[meshes.Mesh, torch.device]:
    """Return the mesh and the device of this rank, or of one process without a process group."""
    torch.set_num_threads(1)
    mesh = meshes.distributed_mesh(layout, "cpu") if dist.is_initialized() else meshes.single_rank_mesh()
    return mesh, torch.device("cpu")


def scorer(layout: Layout, folder: Path, forbidden: list[int]) -> Scorer:
    source = open_weights(folder)
    return Scorer(padded(source.model, layout), layout, *place(layout), source, forbidden)


def samples(seq: int = SEQ) -> Samples:
    """Return overlapping windows of one text."""
    spans = list(split_windows(LENGTH, seq, STRIDE))
    return Samples(tokens(1, LENGTH)[0].numpy(), np.array(spans))


def score(layout: Layout, folder: Path) -> list[tuple[int, float, bool, bool]]:
    source = open_weights(folder)
    experiment = Experiment(name="score", model=padded(source.model, layout), layout=layout)
    return ranks_part.score_samples(experiment, *place(layout), source, samples(source.model.seq), FORBIDDEN)


def continue_greedily(layout: Layout, folder: Path, count: int, forbidden: list[int]) -> list[list[int]]:
    """Continue three prompts of five tokens greedily, by one token per pass."""
    native, ids = scorer(layout, folder, forbidden), tokens(3, 5)
    for _ in range(count):
        counts = torch.zeros_like(ids, dtype=torch.bool)
        counts[:, -1] = True
        found = native.score(ids, ids, counts)
        assert found is not None
        ids = torch.cat([ids, (found.allowed if forbidden else found.predicted)[:, None]], 1)
    return ids.tolist()


def state_bytes(folder: Path) -> int:
    """Return bytes of parameters, gradients and optimizer states after a pass under stage 3."""
    with MemoryTracker() as tracker:
        native = scorer(Layout(dp=2, zero=3, micro_batch=3), folder, [])
        ids = tokens()
        native.score(ids, ids, torch.ones_like(ids, dtype=torch.bool))
        native.finish()
        live = tracker.live()
    return int(live["parameters"] + live["gradients"] + live["optimizer"])
