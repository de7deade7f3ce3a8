"""repro.parallelize of a generator and a critic, each with its optimizer, where one's loss goes through the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, WIDTH, assert_same, layout_of
from tests.wrap.test_penalties import Critic, slope

Optimizer = torch.optim.Optimizer
Step = Callable[[nn.Module, nn.Module, Optimizer, Optimizer, Tensor, Tensor], None]
"""Of generator, critic, their optimizers, samples and noise."""


class Generator(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def usual(g: nn.Module, d: nn.Module, of_g: Optimizer, of_d: Optimizer, real: Tensor, noise: Tensor) -> None:
    """Two backward passes of the critic, then one through both; what the critic gets of it is thrown away."""
    d.zero_grad()
    (d(real) - 1).square().mean().backward()
    fake = g(noise)
    d(fake.detach()).square().mean().backward()
    of_d.step()
    g.zero_grad()
    (d(fake) - 1).square().mean().backward()
    of_g.step()


def one_loss(
    g: nn.Module, d: nn.Module, of_g: Optimizer, of_d: Optimizer, real: Tensor, noise: Tensor
) -> None:
    """The critic's loss is of two passes, and the generator runs without gradients for it."""
    with torch.no_grad():
        fake = g(noise)
    of_d.zero_grad()
    ((d(real) - 1).square() + d(fake).square()).mean().backward()
    of_d.step()
    of_g.zero_grad()
    (d(g(noise)) - 1).square().mean().backward()
    of_g.step()


def frozen(g: nn.Module, d: nn.Module, of_g: Optimizer, of_d: Optimizer, real: Tensor, noise: Tensor) -> None:
    """The critic takes no gradients while the generator learns."""
    fake = g(noise)
    d.requires_grad_(False)
    of_g.zero_grad()
    (d(fake) - 1).square().mean().backward()
    of_g.step()
    d.requires_grad_(True)
    of_d.zero_grad()
    ((d(real) - 1).square() + d(fake.detach()).square()).mean().backward()
    of_d.step()


def wasserstein(
    g: nn.Module, d: nn.Module, of_g: Optimizer, of_d: Optimizer, real: Tensor, noise: Tensor
) -> None:
    """Two steps of the critic, with a penalty, for one of the generator."""
    for sign in (1, -1):
        of_d.zero_grad()
        fake = g(sign * noise).detach()
        penalty = (slope(d, (real + fake) / 2, create_graph=True).norm(dim=-1) - 1).square().mean()
        (0.1 * (d(fake).mean() - d(real).mean()) + penalty).backward()
        of_d.step()
    of_g.zero_grad()
    (-0.1 * d(g(noise)).mean()).backward()
    of_g.step()


def train(step: Step, layout: Layout | None) -> dict[str, Tensor]:
    """Parameters of both after some steps; without a layout of one process with all ranks' samples."""
    torch.manual_seed(1)
    both: list[nn.Module] = [Generator(), Critic()]
    optimizers: list[Optimizer] = [
        torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-4) for m in both
    ]
    if layout is not None:
        for i in range(2):
            both[i], optimizers[i] = repro.parallelize(both[i], optimizers[i], layout)
    data = torch.randn(4, 2, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    for real, noise in data:
        mine = (real.flatten(0, 1), noise.flatten(0, 1))
        if layout is not None:
            mine = (real[dist.get_rank()], noise[dist.get_rank()])
        step(both[0], both[1], optimizers[0], optimizers[1], *mine)
    found = [
        dict(m.named_parameters()) if layout is None else m.repro.full_parameters()  # type: ignore[union-attr]
        for m in both
    ]
    return {f"{i}.{name}": value.detach() for i, of_one in enumerate(found) for name, value in of_one.items()}


@cache
def alone(step: Step) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train(step, None)


STEPS: list[Any] = [usual, one_loss, frozen, wasserstein]


@STAGES
@pytest.mark.parametrize("step", STEPS)
def test_generator_and_critic_train_as_in_one_process(two: RankPool, step: Step, zero: int) -> None:
    assert_same(two.run(train, step, layout_of(zero)), alone(step))
