"""Stage 3: ranks that use different modules are stopped, all of them, before anyone trains on mixed-up weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, WIDTH, layout_of, once, parallelize_sgd


class Experts(nn.Module):
    """Of four experts, the last of which is larger, each rank uses those that it is told to."""

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
    once(module, torch.ones(ROWS, WIDTH)).backward()
    optimizer.step()


def other_expert(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As many experts of the same size."""
    step(module, optimizer, [1 + dist.get_rank()])


def larger_expert(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [2 + dist.get_rank()])


def fewer_experts(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [0, 1][dist.get_rank() :])


def none(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [0][dist.get_rank() :])


def another_order(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(module, optimizer, [1, 2] if dist.get_rank() else [2, 1])


def fewer_evaluations(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The last batches of the ranks' parts of a validation set."""
    with torch.no_grad():
        for _ in range(2 + dist.get_rank()):
            module(torch.ones(ROWS, WIDTH))
    step(module, optimizer, [0])


Habit = Callable[[nn.Module, torch.optim.Optimizer], None]


def message_of(habit: Habit) -> str:
    """What a habit raises after two steps in which all ranks did the same."""
    module, optimizer = parallelize_sgd(Experts(), layout_of(3))
    for _ in range(2):
        step(module, optimizer, [0])
    try:
        habit(module, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


HABITS: list[Any] = [other_expert, larger_expert, fewer_experts, none, another_order, fewer_evaluations]


@pytest.mark.parametrize("habit", HABITS)
def test_ranks_that_use_different_modules_are_refused(habit: Habit) -> None:
    with RankPool(RANKS) as pool:  # of its own: messages remain that nobody receives
        for message in pool.run(message_of, habit):
            assert message.startswith("Ranks that use different modules in a pass")
