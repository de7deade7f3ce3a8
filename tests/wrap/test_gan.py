"""Tests of `repro.parallelize` with a GAN: the generator's loss propagates through the critic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, WIDTH, Plain, assert_same, layout_of
from tests.wrap.test_penalties import Critic, input_gradient

Optim = torch.optim.Optimizer
Step = Callable[[nn.Module, nn.Module, Optim, Optim, Tensor, Tensor], None]
"""Training step of a generator and a critic with their optimizers, on samples and noise."""


def alternating(g: nn.Module, d: nn.Module, opt_g: Optim, opt_d: Optim, real: Tensor, noise: Tensor) -> None:
    """Run two backward passes of the critic, then one of both models; discard the critic's gradients of the latter."""
    d.zero_grad()
    (d(real) - 1).square().mean().backward()
    fake = g(noise)
    d(fake.detach()).square().mean().backward()
    opt_d.step()
    g.zero_grad()
    (d(fake) - 1).square().mean().backward()
    opt_g.step()


def joint_critic_loss(
    g: nn.Module, d: nn.Module, opt_g: Optim, opt_d: Optim, real: Tensor, noise: Tensor
) -> None:
    """Sum the critic's losses of two passes; the generator runs without gradients for the critic."""
    with torch.no_grad():
        fake = g(noise)
    opt_d.zero_grad()
    ((d(real) - 1).square() + d(fake).square()).mean().backward()
    opt_d.step()
    opt_g.zero_grad()
    (d(g(noise)) - 1).square().mean().backward()
    opt_g.step()


def frozen_critic(
    g: nn.Module, d: nn.Module, opt_g: Optim, opt_d: Optim, real: Tensor, noise: Tensor
) -> None:
    """Freeze the critic while the generator trains."""
    fake = g(noise)
    d.requires_grad_(False)
    opt_g.zero_grad()
    (d(fake) - 1).square().mean().backward()
    opt_g.step()
    d.requires_grad_(True)
    opt_d.zero_grad()
    ((d(real) - 1).square() + d(fake.detach()).square()).mean().backward()
    opt_d.step()


def wasserstein(g: nn.Module, d: nn.Module, opt_g: Optim, opt_d: Optim, real: Tensor, noise: Tensor) -> None:
    """Run two steps of the critic with a gradient penalty, then one step of the generator."""
    for sign in (1, -1):
        opt_d.zero_grad()
        fake = g(sign * noise).detach()
        penalty = (input_gradient(d, (real + fake) / 2, create_graph=True).norm(dim=-1) - 1).square().mean()
        (0.1 * (d(fake).mean() - d(real).mean()) + penalty).backward()
        opt_d.step()
    opt_g.zero_grad()
    (-0.1 * d(g(noise)).mean()).backward()
    opt_g.step()


def train(step: Step, layout: Layout | None) -> dict[str, Tensor]:
    """Return the parameters of both models after training; without a layout, one process has all samples."""
    torch.manual_seed(1)
    models: list[nn.Module] = [Plain(), Critic()]
    optimizers: list[Optim] = [
        torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-4) for m in models
    ]
    if layout is not None:
        for i in range(2):
            models[i], optimizers[i] = repro.parallelize(models[i], optimizers[i], layout)
    data = torch.randn(4, 2, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    mine = slice(None) if layout is None else slice(dist.get_rank(), dist.get_rank() + 1)
    for real, noise in data[:, :, mine].flatten(2, 3):
        step(*models, *optimizers, real, noise)  # type: ignore[call-arg,arg-type]
    found = [dict(m.named_parameters()) if layout is None else m.repro.full_parameters() for m in models]  # type: ignore[union-attr]
    return {f"{i}.{name}": value.detach() for i, named in enumerate(found) for name, value in named.items()}


@cache
def reference(step: Step) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train(step, None)


@STAGES
@pytest.mark.parametrize("step", [alternating, joint_critic_loss, frozen_critic, wasserstein])
def test_generator_and_critic_train_like_one_process(two: RankPool, step: Step, zero: int) -> None:
    assert_same(two.run(train, step, layout_of(zero)), reference(step))
