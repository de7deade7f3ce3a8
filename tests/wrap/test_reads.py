"""Who reads or writes a parameter where no module's forward does: hooks, other methods, code after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Containers,
    Plain,
    alone,
    assert_same,
    layout_of,
    once,
    train,
)


class Hooked(nn.Module):
    """Pre-hooks that read the weights: torch's `weight_norm` on every block, and one that scales the input."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for block in self.blocks[:2]:
            torch.nn.utils.weight_norm(block)
        self.blocks[2].register_forward_pre_hook(lambda block, inputs: inputs[0] * block.weight.norm())

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class SideDoor(nn.Module):
    """A block's parameter is read without calling the block, as a method does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.blocks[1].weight, self.blocks[1].bias))
        return self.blocks[2](torch.tanh(self.blocks[0](x)))


def spanning(zero: int) -> Layout:
    """Every bucket of stages 0 to 2 holds several layers."""
    return layout_of(zero, bucket_bytes=1000)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@STAGES
def test_the_users_own_hooks_see_the_weights(two: RankPool, zero: int) -> None:
    hooked = two.run(train, Hooked, spanning(zero), once, nothing, True)
    assert_same(hooked, alone(Hooked))


def nothing(module: nn.Module) -> None:
    """After a step."""


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("kind", [Containers, SideDoor])
def test_no_stale_parameter_is_read(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, spanning(zero), once, nothing, True), alone(kind))


def read_block(module: nn.Module) -> Tensor:
    """A block is used outside the module's own forward, as `model.encoder(x)` and `generate` do."""
    with torch.no_grad():
        return module.blocks[1](torch.ones(1, WIDTH))


def read_child(module: nn.Module) -> Tensor:
    """So is a child that is no block."""
    with torch.no_grad():
        return module.into(torch.ones(1, WIDTH))


def read_weight(module: nn.Module) -> Tensor:
    return module.blocks[2][0].weight.detach().clone()


def values_read(read: Callable[[nn.Module], Tensor], layout: Layout | None) -> list[Tensor]:
    """What is read right after every step; the other rank's part of it comes late."""
    seen: list[Tensor] = []
    train(Plain, layout, once, lambda module: seen.append(read(module)), late=layout is not None)
    return seen


@pytest.mark.parametrize(
    ("read", "zero"),
    [(read_block, 2), (read_block, 3), (read_child, 1), (read_child, 2), (read_weight, 1), (read_weight, 2)],
)
def test_a_read_after_a_step_sees_the_step(two: RankPool, read: Any, zero: int) -> None:
    expected = values_read(read, None)
    assert not torch.equal(expected[0], expected[1])
    for seen in two.run(values_read, read, spanning(zero)):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)
