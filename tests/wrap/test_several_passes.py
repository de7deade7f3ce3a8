"""Tests of losses of several passes or of input gradients: siamese networks, chains, gradient penalties and GANs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import repro
from repro.config import Layout
from repro.config.enums import Category
from repro.measure.memory import MemoryTracker
from tests.pool import RankPool
from tests.wrap.edge_models import (
    RANKS,
    ROWS,
    STAGES,
    WIDTH,
    DataDependent,
    LossFn,
    Plain,
    Reentrant,
    Segments,
    assert_same,
    layout_of,
    loss_fn,
    parallelize_sgd,
    reference,
    train,
)


class Alternating(nn.Module):
    """A model that alternates two blocks four times, with one layer as input and output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x)
        for i in range(4):
            x = x + self.blocks[i % 2](x)
        return self.ends(x)


class Critic(Plain):
    """A smooth model with one output; the input's gradient does not depend on the bias of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


class CheckpointedCritic(Critic):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


def siamese(module: nn.Module, x: Tensor) -> Tensor:
    return (module(x) - module(x.flip(1))).square().mean() + loss_fn(module, -x)


def chain(module: nn.Module, x: Tensor) -> Tensor:
    return loss_fn(module, module(x))


def unrolled(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of all states of a recurrence over five steps."""
    state, loss = torch.zeros_like(x), torch.zeros(())
    for step in range(5):
        state = torch.tanh(module(x * step + state))
        loss = loss + state.square().mean()
    return loss


def detached_target(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss for a detached target, after an evaluation."""
    with torch.no_grad():
        module(-x)
    target = module(x.flip(1)).detach()
    return (module(x) - target).square().mean()


def unused_outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Retain outputs without a loss on rank 1."""
    outputs = [module(x * i) for i in range(3)]
    if dist.is_initialized() and dist.get_rank() == 0:
        outputs.clear()
    return loss_fn(module, x) + 0 * len(outputs)


def checkpointed_chain(module: nn.Module, x: Tensor) -> Tensor:
    checkpointed = partial(checkpoint, use_reentrant=False)
    return checkpointed(module, checkpointed(module, x)).square().mean()


def input_gradient(module: nn.Module, x: Tensor, **more: Any) -> Tensor:
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


SEVERAL_PASSES = [siamese, chain, unrolled, detached_target, unused_outputs, checkpointed_chain]
INPUT_GRADIENTS = [gradient_penalty, wasserstein, evaluated, saliency, adversarial]
CRITICS = [Critic, CheckpointedCritic]


@pytest.mark.parametrize(
    ("kind", "loss_of", "pieces", "stages"),
    [
        # Stages 2 and 3 free gradients or parameters between passes; stages 0 and 1 retain both.
        *((Plain, loss_of, 1, (2, 3)) for loss_of in SEVERAL_PASSES),
        (Plain, chain, 1, (0, 1)),
        *(
            (kind, each, 1, (0, 3))
            for kind in (Reentrant, Alternating, DataDependent)
            for each in (siamese, chain)
        ),
        *((Segments, loss_of, 1, range(4)) for loss_of in (siamese, chain)),
        *((kind, loss_of, 1, range(4)) for kind in CRITICS for loss_of in INPUT_GRADIENTS),
        (Plain, siamese, 2, range(4)),
        (Critic, wasserstein, 2, range(4)),
    ],
)
def test_losses_of_several_passes_train_like_one_process(
    two: RankPool, kind: type[nn.Module], loss_of: LossFn, pieces: int, stages: list[int]
) -> None:
    for zero in stages:
        assert_same(two.run(train, kind, layout_of(zero, pieces), loss_of), reference(kind, loss_of))


def parameter_bytes(loss_of: LossFn, depth: int) -> tuple[int, int]:
    """Return this rank's parameter bytes between steps, and their peak over two steps."""
    with MemoryTracker() as tracker:
        module: nn.Module = Plain()
        module.blocks.extend(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth - 3))
        module, optimizer = parallelize_sgd(module, Layout(dp=RANKS, zero=3))
        for _ in range(2):
            loss_of(module, torch.ones(2, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        resident = tracker.live()
    return resident[Category.PARAMETERS], tracker.most[Category.PARAMETERS]


@pytest.mark.parametrize("loss_of", [siamese, chain, unrolled])
def test_parameters_are_released_between_passes(two: RankPool, loss_of: LossFn) -> None:
    """At most four units are full at once: the outer layer, the last block until its backward pass, and two blocks."""
    unit = 4 * (WIDTH * WIDTH + WIDTH + 8)
    for resident, peak in two.run(parameter_bytes, loss_of, 12):
        assert resident == 13 * unit // RANKS
        assert peak <= resident + 4 * unit


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


def frozen(g: nn.Module, d: nn.Module, opt_g: Optim, opt_d: Optim, real: Tensor, noise: Tensor) -> None:
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


def train_gan(step: Step, layout: Layout | None) -> dict[str, Tensor]:
    """Return the parameters of both models after training; without a layout, one process has all samples."""
    torch.manual_seed(1)
    models: list[Any] = [Plain(), Critic()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-4) for m in models]
    mine = slice(None)
    if layout is not None:
        mine = slice(dist.get_rank(), dist.get_rank() + 1)
        for module, optimizer in zip(models, optimizers, strict=True):
            repro.parallelize(module, optimizer, layout)
    data = torch.randn(4, 2, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    for real, noise in data[:, :, mine].flatten(2, 3):
        step(*models, *optimizers, real, noise)  # type: ignore[call-arg,arg-type]
    found = [dict(m.named_parameters()) if layout is None else m.repro.full_parameters() for m in models]
    return {f"{i}.{name}": value.detach() for i, named in enumerate(found) for name, value in named.items()}


@cache
def gan_reference(step: Step) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train_gan(step, None)


@STAGES
@pytest.mark.parametrize("step", [alternating, frozen])
def test_generator_and_critic_train_like_one_process(two: RankPool, step: Step, zero: int) -> None:
    assert_same(two.run(train_gan, step, layout_of(zero)), gan_reference(step))
