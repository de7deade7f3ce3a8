"""Tests of partly frozen modules (low-rank adapters): stage 3 also partitions the frozen parameters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.config import Layout
from repro.config.enums import Category
from repro.measure.memory import MemoryTracker
from repro.parallel.zero.partition import ALIGNMENT
from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Plain,
    assert_same,
    error_of,
    evaluation_before_backward,
    layout_of,
    loss_fn,
    parallelize_sgd,
    reference,
    train,
)


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 2)
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class LoRA(nn.Module):
    """A model with adapters, one fully frozen block, and frozen parameters outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False) if i == 1 else Adapted(), nn.Tanh())
            for i in range(4)
        )
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)[:, self.order]
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale


class Checkpointed(LoRA):
    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=i == 2)


@STAGES
@pytest.mark.parametrize("kind", [LoRA, Checkpointed])
def test_adapters_train_like_one_process(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero)), reference(kind))
    assert_same(two.run(train, kind, layout_of(zero, 2)), reference(kind))
    assert_same(two.run(train, kind, layout_of(zero), evaluation_before_backward), reference(kind))


def freeze_temporarily(module: nn.Module, step: int) -> None:
    """Freeze block 1 in steps 2 to 4, and layer `into` in steps 3 and 4."""
    module.blocks[1].requires_grad_(step not in (0, 1, 2))
    module.into.requires_grad_(step not in (1, 2))


@STAGES
def test_temporary_freezing_trains_like_one_process(two: RankPool, zero: int) -> None:
    expected = train(Plain, None, after=freeze_temporarily)
    assert not torch.equal(expected["into.weight"], reference(Plain)["into.weight"])
    for pieces in (1, 2):
        assert_same(two.run(train, Plain, layout_of(zero, pieces), loss_fn, freeze_temporarily), expected)


def state_bytes(precision: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return this rank's live bytes by category after two steps, and the peak bytes."""
    with MemoryTracker() as tracker:
        layout = Layout(dp=torch.distributed.get_world_size(), zero=3, precision=precision)
        module, optimizer = parallelize_sgd(LoRA(), layout)
        x = torch.ones(2, WIDTH, dtype=module.scale.dtype)
        for _ in range(2):
            loss_fn(module, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        live = tracker.live()
    return live, tracker.most


def shard_numel(*numels: int, ranks: int) -> int:
    """Return the elements of one rank's shard of contiguous parameters."""
    return -(-sum(numels) // (ranks * ALIGNMENT)) * ALIGNMENT


@pytest.mark.parametrize(("pool", "precision"), [("two", "fp32"), ("four", "bf16")])
def test_stage_3_allocates_one_shard_of_frozen_parameters(
    request: pytest.FixtureRequest, pool: str, precision: str
) -> None:
    """A rank has Psi / Nd frozen values, without gradients and master weights."""
    ranks: RankPool = request.getfixturevalue(pool)
    n, size = ranks.world, 4 if precision == "fp32" else 2
    linear = WIDTH * WIDTH + WIDTH
    adapters = 3 * shard_numel(2 * WIDTH, 2 * WIDTH, ranks=n) + shard_numel(WIDTH, ranks=n)
    frozen = 5 * shard_numel(linear, ranks=n)
    order = 8 * shard_numel(WIDTH, ranks=n)  # int64
    outer = n * (size * (shard_numel(linear, ranks=n) + shard_numel(WIDTH, ranks=n)) + order)
    block = n * size * (shard_numel(linear, ranks=n) + shard_numel(2 * WIDTH, 2 * WIDTH, ranks=n))
    for live, peak in ranks.run(state_bytes, precision):
        assert live[Category.PARAMETERS] == size * (adapters + frozen) + order
        assert live[Category.GRADIENTS] == size * adapters
        assert live[Category.OPTIMIZER] == (0 if precision == "fp32" else 4 * adapters)
        assert live["other"] < size * linear  # the original parameters are freed
        assert peak[Category.PARAMETERS] <= live[Category.PARAMETERS] + outer + 2 * block


def values_and_errors() -> tuple[bool, list[str], torch.Size]:
    """Return whether the values are unchanged, the errors of reads, and the shape of a block's output."""
    module: nn.Module = LoRA()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module, _ = parallelize_sgd(module, layout_of(3), lr=0.0)
    after, x = module.repro.full_parameters(), torch.ones(1, WIDTH)
    is_unchanged = list(after) == list(before) and all(
        torch.equal(after[name], before[name]) for name in before
    )
    reads = ((module.into.weight.norm,), (module.into, x), (module.blocks[1].state_dict,))
    return is_unchanged, [error_of(*read) for read in reads], module.blocks[1](x).shape


def test_frozen_parameters_retain_values_and_refuse_reads(two: RankPool) -> None:
    is_unchanged, errors, shape = two.run(values_and_errors)[0]
    assert is_unchanged
    assert shape == (1, WIDTH)
    for error, remedy in zip(errors, 2 * ["full_parameters"] + ["full_state_dict"], strict=True):
        assert f"module.repro.{remedy}() on all ranks" in error
