"""Tests of parameter reads outside of the module's forward pass: in hooks, in methods and after a step."""

from __future__ import annotations

from collections.abc import Callable

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
    do_nothing,
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


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("kind", [Containers, UncalledBlock])
def test_direct_reads_return_current_parameters(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, large_buckets(zero), loss_fn, do_nothing, True), reference(kind))


READS: dict[str, Callable[[nn.Module], Tensor]] = {
    "block": lambda module: module.blocks[1](torch.ones(1, WIDTH)),
    "child": lambda module: module.into(torch.ones(1, WIDTH)),
    "weight": lambda module: module.blocks[2][0].weight.clone(),
}
"""Reads of parameters outside the module's forward pass; `child` is no block."""


def values_read(name: str, layout: Layout | None) -> list[Tensor]:
    """Return the values read after every step; rank 1 sends its shards late."""
    values: list[Tensor] = []

    @torch.no_grad()
    def read(module: nn.Module) -> None:
        values.append(READS[name](module))

    train(Plain, layout, loss_fn, read, late=layout is not None)
    return values


@pytest.mark.parametrize(
    ("name", "zero"), [("block", 2), ("block", 3), ("child", 1), ("child", 2), ("weight", 1), ("weight", 2)]
)
def test_reads_after_a_step_return_updated_parameters(two: RankPool, name: str, zero: int) -> None:
    expected = values_read(name, None)
    assert not torch.equal(expected[0], expected[1])
    for values in two.run(values_read, name, large_buckets(zero)):
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
