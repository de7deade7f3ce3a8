"""Tests of parameter reads outside of the module's forward pass: in hooks, in methods and after a step."""

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
    assert_same,
    layout_of,
    loss_fn,
    reference,
    train,
)


class Hooked(nn.Module):
    """A model with pre-hooks that read weights: `weight_norm` on two blocks, and a hook that scales the input."""

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


class UncalledBlock(nn.Module):
    """A model that reads the parameters of a block without calling the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.blocks[1].weight, self.blocks[1].bias))
        return self.blocks[2](torch.tanh(self.blocks[0](x)))


def large_buckets(zero: int) -> Layout:
    """Return a layout in which every bucket of stages 0 to 2 contains several layers."""
    return layout_of(zero, bucket_bytes=1000)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@STAGES
def test_forward_pre_hooks_read_current_weights(two: RankPool, zero: int) -> None:
    hooked = two.run(train, Hooked, large_buckets(zero), loss_fn, do_nothing, True)
    assert_same(hooked, reference(Hooked))


def do_nothing(module: nn.Module) -> None:
    """Do nothing after a step."""


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("kind", [Containers, UncalledBlock])
def test_direct_reads_return_current_parameters(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, large_buckets(zero), loss_fn, do_nothing, True), reference(kind))


def read_block(module: nn.Module) -> Tensor:
    """Call a block outside the module's forward pass, like `model.encoder(x)`."""
    with torch.no_grad():
        return module.blocks[1](torch.ones(1, WIDTH))


def read_child(module: nn.Module) -> Tensor:
    """Call a child that is not a block outside the module's forward pass."""
    with torch.no_grad():
        return module.into(torch.ones(1, WIDTH))


def read_weight(module: nn.Module) -> Tensor:
    return module.blocks[2][0].weight.detach().clone()


def values_read(read: Callable[[nn.Module], Tensor], layout: Layout | None) -> list[Tensor]:
    """Return the values read after every step; rank 1 sends its shards late."""
    values: list[Tensor] = []
    train(Plain, layout, loss_fn, lambda module: values.append(read(module)), late=layout is not None)
    return values


@pytest.mark.parametrize(
    ("read", "zero"),
    [(read_block, 2), (read_block, 3), (read_child, 1), (read_child, 2), (read_weight, 1), (read_weight, 2)],
)
def test_reads_after_a_step_return_updated_parameters(two: RankPool, read: Any, zero: int) -> None:
    expected = values_read(read, None)
    assert not torch.equal(expected[0], expected[1])
    for values in two.run(values_read, read, large_buckets(zero)):
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
