"""Tests that stage 3 raises an error on all ranks if they use different modules in a pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, WIDTH, error_of, layout_of, loss_fn, parallelize_sgd


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


def error_after_two_equal_steps(chosen: tuple[list[int], list[int]], evaluations: tuple[int, int]) -> str:
    """Return the error of a step with the experts in `chosen[rank]` after `evaluations[rank]` evaluations."""
    module, optimizer = parallelize_sgd(Experts(), layout_of(3))
    for _ in range(2):
        step(module, optimizer, [0])

    def deviate() -> None:
        with torch.no_grad():
            for _ in range(evaluations[dist.get_rank()]):
                module(torch.ones(ROWS, WIDTH))
        step(module, optimizer, chosen[dist.get_rank()])

    return error_of(deviate)


@pytest.mark.parametrize(
    ("chosen", "evaluations"),
    [
        pytest.param(([1], [2]), (0, 0), id="other expert of equal size"),
        pytest.param(([2], [3]), (0, 0), id="larger expert"),
        pytest.param(([0, 1], [1]), (0, 0), id="fewer experts"),
        pytest.param(([0], []), (0, 0), id="no expert"),
        pytest.param(([2, 1], [1, 2]), (0, 0), id="another order"),
        pytest.param(([0], [0]), (2, 3), id="one more evaluation"),
    ],
)
def test_ranks_that_use_different_modules_raise_an_error(
    chosen: tuple[list[int], list[int]], evaluations: tuple[int, int]
) -> None:
    with RankPool(RANKS) as pool:  # a separate pool, because messages remain unreceived
        for message in pool.run(error_after_two_equal_steps, chosen, evaluations):
            assert message.startswith("Ranks that use different modules in a pass")
