"""Tests of losses that contain gradients of the input: penalties, saliency and adversarial inputs."""

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
    LossFn,
    Plain,
    assert_same,
    error_of,
    layout_of,
    loss_fn,
    parallelize_sgd,
    reference,
    train,
)


class Critic(Plain):
    """A smooth model with one output; the input's gradient does not depend on the bias of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


class CheckpointedCritic(Critic):
    """`Critic` with activation checkpointing of each block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


def input_gradient(module: nn.Module, x: Tensor, **more: Any) -> Tensor:
    """Return the gradient of the output with respect to the input."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(module(x).sum(), x, **more)[0]


def gradient_penalty(module: nn.Module, x: Tensor) -> Tensor:
    """Return a penalty on the gradient's norm; the output itself has no loss."""
    return (input_gradient(module, x, create_graph=True).norm(dim=-1) - 1).square().mean()


def wasserstein(module: nn.Module, x: Tensor) -> Tensor:
    """Return the critic loss of a Wasserstein GAN, with passes before and after the pass of the penalty."""
    fake = module(-x).mean()
    penalty = gradient_penalty(module, x)
    return 0.1 * (fake - module(x).mean()) + penalty


def evaluated(module: nn.Module, x: Tensor) -> Tensor:
    """Evaluate and copy all parameters between the input's gradient and its backward pass."""
    loss = gradient_penalty(module, x)
    with torch.no_grad():
        module(-x)
    if hasattr(module, "repro"):
        module.repro.full_parameters()
    return loss + loss_fn(module, x)


def saliency(module: nn.Module, x: Tensor) -> Tensor:
    """Weight the output by a gradient that has no graph."""
    x = x.clone().requires_grad_()
    out = module(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return (out * gradient.abs()).square().mean()


def adversarial(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of an adversarial input; the graph of its gradient is freed."""
    return loss_fn(module, x + 0.1 * input_gradient(module, x).sign())


LOSSES: list[Any] = [gradient_penalty, wasserstein, evaluated, saliency, adversarial]


@STAGES
@pytest.mark.parametrize("loss_of", LOSSES)
def test_losses_of_input_gradients_train_like_one_process(two: RankPool, loss_of: LossFn, zero: int) -> None:
    for kind in (Critic, CheckpointedCritic):
        assert_same(two.run(train, kind, layout_of(zero), loss_of), reference(Critic, loss_of))


@STAGES
def test_gradient_penalty_supports_gradient_accumulation(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Critic, layout_of(zero, 2), wasserstein), reference(Critic, wasserstein))


def output_and_reference(between: LossFn) -> tuple[Tensor, Tensor]:
    """Return the output after a step with an unused graph, and that of a stock module with equal parameters."""
    torch.manual_seed(0)
    module, optimizer = parallelize_sgd(Critic(), layout_of(3))
    x = torch.ones(1, WIDTH)
    loss_fn(module, x).backward()
    unused_graph = between(module, x)
    optimizer.step()
    found = module(x)
    del unused_graph
    expected = Critic()
    expected.load_state_dict(module.repro.full_parameters())
    return found.detach(), expected(x).detach()


@pytest.mark.parametrize("between", [loss_fn, gradient_penalty])
def test_unused_graph_leaves_no_stale_parameters_after_step(two: RankPool, between: LossFn) -> None:
    for found, expected in two.run(output_and_reference, between):
        torch.testing.assert_close(found, expected)


def create_graph_of_gradients(zero: int) -> None:
    module, _ = parallelize_sgd(Critic(), layout_of(zero))
    loss_fn(module, torch.ones(1, WIDTH)).backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
@STAGES
def test_backward_with_create_graph_is_refused(two: RankPool, zero: int) -> None:
    for message in two.run(error_of, create_graph_of_gradients, zero):
        assert "backward(create_graph=True) is not supported" in message
