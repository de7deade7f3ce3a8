"""repro.parallelize where a loss is of gradients: penalties, saliency, the backward passes that only look."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Pass,
    Plain,
    alone,
    assert_same,
    layout_of,
    message_of,
    once,
    parallelize_sgd,
    train,
)


class Critic(Plain):
    """Smooth, with one output; its last layer's bias is in no gradient by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


class CheckpointedCritic(Critic):
    """Each block is computed again in every backward pass."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


def slope(module: nn.Module, x: Tensor, **more: Any) -> Tensor:
    """The gradient of the output by the input."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(module(x).sum(), x, **more)[0]


def penalty(module: nn.Module, x: Tensor) -> Tensor:
    """Of the gradient alone: the output itself gets none."""
    return (slope(module, x, create_graph=True).norm(dim=-1) - 1).square().mean()


def critic(module: nn.Module, x: Tensor) -> Tensor:
    """As of a Wasserstein GAN: passes before and after the one whose gradient is looked at."""
    fake = module(-x).mean()
    wanted = penalty(module, x)
    return 0.1 * (fake - module(x).mean()) + wanted


def interrupted(module: nn.Module, x: Tensor) -> Tensor:
    """Evaluation, and copies of all parameters, between a look and its backward pass."""
    loss = penalty(module, x)
    with torch.no_grad():
        module(-x)
    if hasattr(module, "repro"):
        module.repro.full_parameters()
    return loss + once(module, x)


def saliency(module: nn.Module, x: Tensor) -> Tensor:
    """The look makes no graph."""
    x = x.clone().requires_grad_()
    out = module(x)
    (seen,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return (out * seen.abs()).square().mean()


def adversarial(module: nn.Module, x: Tensor) -> Tensor:
    """The graph that was looked at is gone."""
    return once(module, x + 0.1 * slope(module, x).sign())


LOSSES: list[Any] = [penalty, critic, interrupted, saliency, adversarial]


@STAGES
@pytest.mark.parametrize("loss_of", LOSSES)
def test_a_loss_of_gradients(two: RankPool, loss_of: Pass, zero: int) -> None:
    for kind in (Critic, CheckpointedCritic):
        assert_same(two.run(train, kind, layout_of(zero), loss_of), alone(Critic, loss_of))


@STAGES
def test_a_look_in_every_micro_batch(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Critic, layout_of(zero, 2), critic), alone(Critic, critic))


def abandoned(between: Pass) -> tuple[Tensor, Tensor]:
    """The output after a step before which somebody made a graph, and what it is with these parameters."""
    torch.manual_seed(0)
    module, optimizer = parallelize_sgd(Critic(), layout_of(3))
    x = torch.ones(1, WIDTH)
    once(module, x).backward()
    kept = between(module, x)
    optimizer.step()
    found = module(x)
    del kept
    expected = Critic()
    expected.load_state_dict(module.repro.full_parameters())
    return found.detach(), expected(x).detach()


@pytest.mark.parametrize("between", [once, penalty])
def test_nothing_old_is_read_after_a_step(two: RankPool, between: Pass) -> None:
    for found, expected in two.run(abandoned, between):
        torch.testing.assert_close(found, expected)


def gradients_with_a_graph(zero: int) -> None:
    module, _ = parallelize_sgd(Critic(), layout_of(zero))
    once(module, torch.ones(1, WIDTH)).backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
@STAGES
def test_gradients_of_parameters_have_no_graph(two: RankPool, zero: int) -> None:
    for message in two.run(message_of, gradients_with_a_graph, zero):
        assert "backward(create_graph=True) is not supported" in message
