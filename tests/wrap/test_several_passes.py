"""repro.parallelize where one loss is of several forward passes: siamese networks, a module on its own output."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import repro
from repro.config import Layout
from repro.config.enums import Category
from repro.measure.memory import MemoryTracker
from tests.pool import RankPool
from tests.wrap.edge_models import (
    RANKS,
    STAGES,
    WIDTH,
    DataDependent,
    Pass,
    Plain,
    Reentrant,
    Segments,
    alone,
    assert_same,
    layout_of,
    once,
    train,
)


class Shared(nn.Module):
    """Two blocks that take turns, four times, and a matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x)
        for i in range(4):
            x = x + self.blocks[i % 2](x)
        return self.ends(x)


def pair(module: nn.Module, x: Tensor) -> Tensor:
    """Siamese."""
    return (module(x) - module(x.flip(1))).square().mean() + once(module, -x)


def triplet(module: nn.Module, x: Tensor) -> Tensor:
    anchor, near, far = (module(y) for y in (x, x + 0.1, -x))
    return nn.functional.triplet_margin_loss(anchor, near, far, margin=3.0)


def chain(module: nn.Module, x: Tensor) -> Tensor:
    """The module on its own output."""
    return module(module(x)).square().mean()


def unrolled(module: nn.Module, x: Tensor) -> Tensor:
    """In time, every state in the loss."""
    state, loss = torch.zeros_like(x), torch.zeros(())
    for step in range(5):
        state = torch.tanh(module(x * step + state))
        loss = loss + state.square().mean()
    return loss


def target(module: nn.Module, x: Tensor) -> Tensor:
    """Of the two outputs one is a target, and between them is one that is for show."""
    with torch.no_grad():
        module(-x)
    wanted = module(x.flip(1)).detach()
    return (module(x) - wanted).square().mean()


def kept(module: nn.Module, x: Tensor) -> Tensor:
    """Rank 1 keeps outputs of which no loss is made."""
    outputs = [module(x * i) for i in range(3)]
    if dist.is_initialized() and dist.get_rank() == 0:
        outputs.clear()
    return once(module, x) + 0 * len(outputs)


def whole_checkpoints(module: nn.Module, x: Tensor) -> Tensor:
    again = partial(checkpoint, use_reentrant=False)
    return again(module, again(module, x)).square().mean()


PASSES: list[Any] = [pair, triplet, chain, unrolled, target, kept, whole_checkpoints]


@pytest.mark.parametrize(
    ("loss_of", "zero"),
    [*((loss_of, zero) for zero in (2, 3) for loss_of in PASSES), *((chain, zero) for zero in (0, 1))],
)
def test_one_loss_of_several_forward_passes(two: RankPool, loss_of: Pass, zero: int) -> None:
    """Stages 2 and 3 free gradients or parameters between passes; stages 0 and 1 retain both."""
    assert_same(two.run(train, Plain, layout_of(zero), loss_of), alone(Plain, loss_of))


UNUSUAL = [
    *((kind, zero) for kind in (Reentrant, Shared, DataDependent) for zero in (0, 3)),
    *((Segments, zero) for zero in range(4)),
]


@pytest.mark.parametrize(("kind", "zero"), UNUSUAL)
def test_unusual_modules_in_several_passes(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    for loss_of in (pair, chain):
        assert_same(two.run(train, kind, layout_of(zero), loss_of), alone(kind, loss_of))


@STAGES
def test_accumulation_of_several_passes(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero, 2), pair), alone(Plain, pair))


def most_parameters(loss_of: Pass, depth: int) -> tuple[int, int]:
    """Bytes of parameters that this rank holds between steps, and the most at any moment of two steps."""
    with MemoryTracker() as tracker:
        module: nn.Module = Plain()
        module.blocks.extend(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth - 3))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module, optimizer = repro.parallelize(module, optimizer, Layout(dp=RANKS, zero=3))
        for _ in range(2):
            loss_of(module, torch.ones(2, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        rest = tracker.live()
    return rest[Category.PARAMETERS], tracker.most[Category.PARAMETERS]


@pytest.mark.parametrize("loss_of", [pair, chain, unrolled])
def test_parameters_are_freed_between_the_passes(two: RankPool, loss_of: Pass) -> None:
    """Whole at once are what surrounds the blocks, the last block, which waits for its backward pass, and two."""
    unit = 4 * (WIDTH * WIDTH + WIDTH + 8)
    for rest, most in two.run(most_parameters, loss_of, 12):
        assert rest == 13 * unit // RANKS
        assert most <= rest + 4 * unit
