"""Tests of losses of several forward passes: siamese networks, triplets, a module on its own output."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.config import Layout
from repro.config.enums import Category
from repro.measure.memory import MemoryTracker
from tests.pool import RankPool
from tests.wrap.edge_models import (
    RANKS,
    STAGES,
    WIDTH,
    DataDependent,
    LossFn,
    Plain,
    Reentrant,
    Segments,
    assert_same,
    layout_of,
    loss_fn,
    parallelize_sgd,
    reference,
    train,
)


class Alternating(nn.Module):
    """A model that alternates two blocks four times, with one layer as input and output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x)
        for i in range(4):
            x = x + self.blocks[i % 2](x)
        return self.ends(x)


def siamese(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of a siamese network."""
    return (module(x) - module(x.flip(1))).square().mean() + loss_fn(module, -x)


def triplet(module: nn.Module, x: Tensor) -> Tensor:
    anchor, near, far = (module(y) for y in (x, x + 0.1, -x))
    return nn.functional.triplet_margin_loss(anchor, near, far, margin=3.0)


def chain(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of the module on its own output."""
    return module(module(x)).square().mean()


def unrolled(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of all states of a recurrence over five steps."""
    state, loss = torch.zeros_like(x), torch.zeros(())
    for step in range(5):
        state = torch.tanh(module(x * step + state))
        loss = loss + state.square().mean()
    return loss


def detached_target(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss for a detached target, after an evaluation."""
    with torch.no_grad():
        module(-x)
    target = module(x.flip(1)).detach()
    return (module(x) - target).square().mean()


def unused_outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Retain outputs without a loss on rank 1."""
    outputs = [module(x * i) for i in range(3)]
    if dist.is_initialized() and dist.get_rank() == 0:
        outputs.clear()
    return loss_fn(module, x) + 0 * len(outputs)


def checkpointed_chain(module: nn.Module, x: Tensor) -> Tensor:
    checkpointed = partial(checkpoint, use_reentrant=False)
    return checkpointed(module, checkpointed(module, x)).square().mean()


LOSSES: list[Any] = [siamese, triplet, chain, unrolled, detached_target, unused_outputs, checkpointed_chain]


@pytest.mark.parametrize(
    ("loss_of", "zero"),
    [*((loss_of, zero) for zero in (2, 3) for loss_of in LOSSES), *((chain, zero) for zero in (0, 1))],
)
def test_losses_of_several_passes_train_like_one_process(two: RankPool, loss_of: LossFn, zero: int) -> None:
    """Stages 2 and 3 free gradients or parameters between passes; stages 0 and 1 retain both."""
    assert_same(two.run(train, Plain, layout_of(zero), loss_of), reference(Plain, loss_of))


UNUSUAL_MODULES = [
    *((kind, zero) for kind in (Reentrant, Alternating, DataDependent) for zero in (0, 3)),
    *((Segments, zero) for zero in range(4)),
]


@pytest.mark.parametrize(("kind", "zero"), UNUSUAL_MODULES)
def test_unusual_modules_support_several_passes(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    for loss_of in (siamese, chain):
        assert_same(two.run(train, kind, layout_of(zero), loss_of), reference(kind, loss_of))


@STAGES
def test_accumulation_supports_several_passes(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero, 2), siamese), reference(Plain, siamese))


def parameter_bytes(loss_of: LossFn, depth: int) -> tuple[int, int]:
    """Return this rank's parameter bytes between steps, and their peak over two steps."""
    with MemoryTracker() as tracker:
        module: nn.Module = Plain()
        module.blocks.extend(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth - 3))
        module, optimizer = parallelize_sgd(module, Layout(dp=RANKS, zero=3))
        for _ in range(2):
            loss_of(module, torch.ones(2, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        resident = tracker.live()
    return resident[Category.PARAMETERS], tracker.most[Category.PARAMETERS]


@pytest.mark.parametrize("loss_of", [siamese, chain, unrolled])
def test_parameters_are_released_between_passes(two: RankPool, loss_of: LossFn) -> None:
    """At most four units are full at once: the outer layer, the last block until its backward pass, and two blocks."""
    unit = 4 * (WIDTH * WIDTH + WIDTH + 8)
    for resident, peak in two.run(parameter_bytes, loss_of, 12):
        assert resident == 13 * unit // RANKS
        assert peak <= resident + 4 * unit
