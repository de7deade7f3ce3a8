"""Tests that stage 3 raises an error on all ranks if they use different modules in a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, WIDTH, layout_of, loss_fn, parallelize_sgd


class Experts(nn.Module):
    """A model of four experts, the last of which is larger; `chosen` lists the experts in use."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)) for width in (8, 8, 8, 64)
        )
        self.chosen: list[int] = [0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for e in self.chosen:
            x = x + self.experts[e](x)
        return x


def step(module: nn.Module, optimizer: torch.optim.Optimizer, chosen: list[int]) -> None:
    module.chosen = chosen  # type: ignore[assignment]
    loss_fn(module, torch.ones(ROWS, WIDTH)).backward()
    optimizer.step()


def other_expert(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Use a different expert of equal size on each rank."""
    step(module, optimizer, [1 + dist.get_rank()])


def larger_expert(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [2 + dist.get_rank()])


def fewer_experts(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [0, 1][dist.get_rank() :])


def no_expert(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [0][dist.get_rank() :])


def another_order(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [1, 2] if dist.get_rank() else [2, 1])


def fewer_evaluations(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run one more evaluation batch on rank 1."""
    with torch.no_grad():
        for _ in range(2 + dist.get_rank()):
            module(torch.ones(ROWS, WIDTH))
    step(module, optimizer, [0])


Deviation = Callable[[nn.Module, torch.optim.Optimizer], None]


def error_of(deviation: Deviation) -> str:
    """Return the error of a deviation after two equal steps on all ranks."""
    module, optimizer = parallelize_sgd(Experts(), layout_of(3))
    for _ in range(2):
        step(module, optimizer, [0])
    try:
        deviation(module, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


CASES: list[Any] = [other_expert, larger_expert, fewer_experts, no_expert, another_order, fewer_evaluations]


@pytest.mark.parametrize("deviation", CASES)
def test_ranks_that_use_different_modules_raise_an_error(deviation: Deviation) -> None:
    with RankPool(RANKS) as pool:  # a separate pool, because messages remain unreceived
        for message in pool.run(error_of, deviation):
            assert message.startswith("Ranks that use different modules in a pass")
