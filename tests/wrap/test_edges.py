"""Tests of `repro.parallelize` with unusual modules, passes and reads of parameters: training matches one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Containers,
    DataDependent,
    LossFn,
    Plain,
    Reentrant,
    Segments,
    Stack,
    assert_same,
    evaluation_before_backward,
    layout_of,
    loss_fn,
    parallelize_sgd,
    reference,
    train,
)


def full_checkpoint(reentrant: bool, module: nn.Module, x: Tensor) -> Tensor:
    """Recompute the full module in the backward pass."""
    return checkpoint(module, x.requires_grad_(), use_reentrant=reentrant).square().mean()


def failed_backward(module: nn.Module, x: Tensor) -> Tensor:
    """Run a backward pass that fails, then return the loss."""
    out = module(x)
    out.grad_fn.register_prehook(lambda gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.square().mean().backward()
    return loss_fn(module, x)


def unused_forward(module: nn.Module, x: Tensor) -> Tensor:
    """Run a forward pass with a graph but without a backward pass, then return the loss."""
    loss_fn(module, -x)
    return loss_fn(module, x)


@STAGES
@pytest.mark.parametrize(
    ("kind", "loss_of", "pieces"),
    [
        *((kind, loss_fn, 1) for kind in (DataDependent, Containers)),
        *((kind, loss_fn, pieces) for kind in (Reentrant, Segments) for pieces in (1, 2)),
        *((Plain, partial(full_checkpoint, reentrant), 1) for reentrant in (False, True)),
        *((Plain, loss_of, 1) for loss_of in (evaluation_before_backward, failed_backward, unused_forward)),
        (Reentrant, unused_forward, 1),
    ],
)
def test_unusual_modules_and_passes_train_like_one_process(
    two: RankPool, kind: type[nn.Module], loss_of: LossFn, pieces: int, zero: int
) -> None:
    """Every loss function equals `loss_fn`, apart from additional passes or checkpoints."""
    assert_same(two.run(train, kind, layout_of(zero, pieces), loss_of), reference(kind))


class Routed(Plain):
    """A model whose blocks store an auxiliary loss in an attribute, which no hook on their output receives."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
            self.balance: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.balance = self.router(x).softmax(-1).square().mean()
            return torch.tanh(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed.Block() for _ in range(3))


def routed_loss(module: nn.Module, x: Tensor) -> Tensor:
    return loss_fn(module, x) + sum(block.balance for block in module.blocks)


class Hooked(Stack):
    """A model with pre-hooks that read weights: `weight_norm` on two blocks, and a hook that scales the input."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            torch.nn.utils.weight_norm(block)
        self.blocks[2].register_forward_pre_hook(lambda block, inputs: inputs[0] * block.weight.norm())


class UncalledBlock(Stack):
    """A model that reads the parameters of a block without calling the block."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.blocks[1].weight, self.blocks[1].bias))
        return self.blocks[2](torch.tanh(self.blocks[0](x)))


def large_buckets(zero: int) -> Layout:
    """Return a layout in which every bucket of stages 0 to 2 contains several layers."""
    return layout_of(zero, bucket_bytes=1000)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    ("kind", "loss_of", "layout"),
    [
        *((Routed, routed_loss, layout_of(zero)) for zero in range(4)),
        *((Hooked, loss_fn, large_buckets(zero)) for zero in range(4)),
        *((kind, loss_fn, large_buckets(zero)) for kind in (Containers, UncalledBlock) for zero in (1, 2)),
    ],
)
def test_reads_during_a_pass_return_current_parameters(
    two: RankPool, kind: type[nn.Module], loss_of: LossFn, layout: Layout
) -> None:
    """The result does not depend on when rank 1 sends its updated parameters."""
    for late in (False, True):
        assert_same(two.run(train, kind, layout, loss_of, None, late), reference(kind, loss_of))


READS: dict[str, Callable[[nn.Module], Tensor]] = {
    "block": lambda module: module.blocks[1](torch.ones(1, WIDTH)),
    "child": lambda module: module.into(torch.ones(1, WIDTH)),
    "weight": lambda module: module.blocks[2][0].weight.clone(),
    "state": lambda module: torch.cat([value.flatten() for value in module.state_dict().values()]),
    "block's state": lambda module: module.blocks[1].state_dict()["0.weight"].clone(),
}
"""Reads of parameters outside the module's forward pass; `child` is no block."""


def values_read(name: str, layout: Layout | None) -> list[Tensor]:
    """Return the values read after every step; rank 1 sends its shards late."""
    values: list[Tensor] = []

    @torch.no_grad()
    def read(module: nn.Module, step: int) -> None:
        values.append(READS[name](module))

    train(Plain, layout, loss_fn, read, late=layout is not None)
    return values


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        *[("block", 2), ("block", 3), ("child", 1), ("child", 2), ("weight", 1), ("weight", 2)],
        *((name, zero) for name in ("state", "block's state") for zero in range(3)),
    ],
)
def test_reads_after_a_step_return_updated_parameters(two: RankPool, name: str, zero: int) -> None:
    expected = values_read(name, None)
    assert not torch.equal(expected[0], expected[1])
    for values in two.run(values_read, name, large_buckets(zero)):
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)


class Compiled(Plain):
    """A compiled `Plain` without code generation."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


def train_compiled(layout: Layout) -> dict[str, Tensor]:
    torch._dynamo.reset()
    return train(Compiled, layout)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@STAGES
def test_compiled_module_trains_like_one_process(two: RankPool, zero: int) -> None:
    """`torch.compile` also traces hooks."""
    assert_same(two.run(train_compiled, layout_of(zero)), reference(Plain))


def backward_events(reentrant: bool | None) -> list[str]:
    """Return the collectives and gradient accumulations of the second step's backward pass, in order."""
    module, optimizer = parallelize_sgd(Stack(reentrant), layout_of(3))
    events: list[str] = []
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    ledger = module.repro.sharding.group.ledger
    ledger.observers.append(lambda sequence, op, name, purpose: events.append(purpose))
    for _ in range(2):
        loss = loss_fn(module, torch.ones(1, WIDTH))
        events.clear()
        loss.backward()
        events_of_step = list(events)
        optimizer.step()
    return events_of_step


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_stage_3_overlaps_collectives_with_the_backward_pass(two: RankPool, reentrant: bool | None) -> None:
    """After the backward pass of block i, its gradients are reduced and the parameters of block i - 2 gathered."""
    last = ["parameters"] if reentrant else []  # the first run, under no_grad, releases the last block
    for events_of_step in two.run(backward_events, reentrant):
        assert [event for event in events_of_step if event != "blocks.3.weight"][: len(last)] == last
        assert events_of_step[len(last) :] == [
            *("parameters", "blocks.3.weight"),
            *("gradients", "parameters", "blocks.2.weight"),
            *("gradients", "parameters", "blocks.1.weight"),
            *("gradients", "blocks.0.weight"),
            *("gradients", "into.weight"),
            "gradients",
        ]
