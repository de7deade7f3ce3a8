"""Training of one experiment on the ranks of a pool, with the results that parity tests compare."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from repro.config import Experiment, Layout, Model, Training
from repro.engines import build_engine
from repro.engines.native.model_part import MicroBatch
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel.comm import Group

TINY = Model(name="tiny", layers=4, hidden=32, heads=4, vocab=96, seq=16)

LEARNING: dict[str, Any] = {"steps": 8, "lr": 6e-3, "warmup_steps": 1}
"""Training of parity tests: weights change as in 20 steps with the default rate, and the loss by over a tenth."""
FEW = {**LEARNING, "steps": 4}
"""Training with 4 steps, in which every buffer is reused. `parallel/test_parity.py` shows that the loss falls."""


def smallest(layout: Layout) -> Model:
    """Return TINY with as few blocks as the layout allows, because collectives dominate the time of a test.

    A pipeline needs one block for each part. Stage 3 needs three blocks, because it gathers the block after the running
    one and frees the block before. Other layouts need two.
    """
    least = 3 if layout.zero == 3 else 2
    layers = sum(layout.stage_layers) if layout.stage_layers else max(least, layout.pp * layout.chunks)
    return replace(TINY, name=f"tiny-{layers}", layers=layers)


@dataclass
class Trained:
    """Results of a training on one rank, with the stage's parameters gathered over dp and tp."""

    loss: list[float]
    norm: list[float]
    parameters: dict[str, Tensor]
    skipped: list[int] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    traffic: list[dict[str, Any]] = field(default_factory=list)
    pipeline: dict[str, Any] = field(default_factory=dict)


def tiny(layout: Layout, model: Model = TINY, engine: str = "native", **training: Any) -> Experiment:
    """Return an experiment of 20 AdamW steps with clipped gradients.

    `eps` is above rounding errors. Softmax ignores the bias of the keys, so the gradient of this bias contains only
    rounding errors. With a tiny `eps`, Adam would turn these errors into steps of full size.
    """
    defaults: dict[str, Any] = {"steps": 20, "lr": 3e-3, "warmup_steps": 2, "eps": 1e-6, "clip": 0.3}
    settings = Training(**defaults | training)
    return Experiment(name="tiny", model=model, layout=layout, training=settings, engine=engine)


def tokens_of(experiment: Experiment, step: int) -> Tensor:
    """Return the step's global batch [B, s + 1], a learnable pattern with noise that is equal on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    b, s, v = experiment.layout.global_batch, experiment.seq, experiment.model.vocab
    start = torch.randint(v, (b, 1), generator=generator)
    stride = torch.randint(1, 4, (b, 1), generator=generator)
    return (start + stride * torch.arange(s + 1)) % v


def micro_batches(experiment: Experiment, dp_rank: int, step: int, device: str = "cpu") -> list[MicroBatch]:
    """Return the micro-batches of one replica."""
    layout = experiment.layout
    full = tokens_of(experiment, step).to(device)
    found = []
    for k in range(layout.accumulation):
        first = dp_rank * layout.replica_batch + k * layout.micro_batch
        part = full[first : first + layout.micro_batch]
        found.append(
            MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), BatchPosition(step, first))
        )
    return found


def whole_parameters(engine: Any, tp: Group) -> dict[str, Tensor]:
    """Return the parameters, gathered over tp along the dimension that tp splits."""
    found = {}
    splits = engine.splits() if hasattr(engine, "splits") else {}
    for name, local in engine.full_parameters().items():
        split = splits.get(name)
        if tp.size > 1 and split is not None:
            parts = torch.empty(tp.size * local.numel(), dtype=local.dtype)
            tp.all_gather(parts, local.contiguous().view(-1)).wait()
            pieces = parts.view(tp.size, *local.shape).unbind(0)
            local = torch.cat(pieces, dim=split)
        found[name] = local
    return found


def train(experiment: Experiment, device: str = "cpu") -> Trained:
    """Train on this rank, or in one process without a process group, and return the gathered results."""
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, device) if dist.is_initialized() else meshes.single_rank_mesh()
    engine = build_engine(experiment, mesh, torch.device(device))
    trained = Trained([], [], {})
    for step in range(experiment.training.steps):
        if step == experiment.training.steps - 1:
            mesh.ledger.reset()
        scale = engine.loss_scale()
        if scale is not None:
            trained.scale.append(float(scale))
        norms = engine.step(
            micro_batches(experiment, layout.index_of("dp", mesh.rank), step, device), lambda phase: None
        )
        if norms.overflow.item():
            trained.skipped.append(step)
        trained.loss.append(norms.loss.item())
        trained.norm.append(norms.gradient.item())
    engine.synchronize()
    trained.traffic = mesh.ledger.rows()
    trained.pipeline = engine.pipeline_report() if layout.pp > 1 else {}
    trained.parameters = whole_parameters(engine, mesh.tp)
    return trained
