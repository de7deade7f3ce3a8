"""Tests of partly frozen modules (low-rank adapters): stage 3 also partitions the frozen parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

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
    """`LoRA` with activation checkpointing of each block."""

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


class Counting(Plain):
    """`Plain` with a counter of steps for `freeze_temporarily`."""

    steps = 0


def freeze_temporarily(module: nn.Module) -> None:
    """Freeze block 1 in steps 2 to 4, and layer `into` in steps 3 and 4."""
    module.steps += 1  # type: ignore[operator]
    module.blocks[1].requires_grad_(not 1 <= module.steps < 4)  # type: ignore[operator]
    module.into.requires_grad_(not 2 <= module.steps < 4)  # type: ignore[operator]


@STAGES
def test_temporary_freezing_trains_like_one_process(two: RankPool, zero: int) -> None:
    expected = train(Counting, None, after=freeze_temporarily)
    assert not torch.equal(expected["into.weight"], reference(Counting)["into.weight"])
    for pieces in (1, 2):
        assert_same(two.run(train, Counting, layout_of(zero, pieces), loss_fn, freeze_temporarily), expected)


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


def names_values_and_errors() -> dict[str, Any]:
    module: nn.Module = LoRA()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module, _ = parallelize_sgd(module, layout_of(3), lr=0.0)
    after = module.repro.full_parameters()
    return {
        "names": list(after) == list(before),
        "values": [name for name in before if not torch.equal(after[name], before[name])],
        "read": error_of(module.into.weight.norm),
        "state_dict": error_of(module.blocks[1].state_dict),
        "use": error_of(module.into, torch.ones(1, WIDTH)),
        "block": module.blocks[1](torch.ones(1, WIDTH)).shape,
    }


def test_frozen_parameters_retain_values_and_refuse_reads(two: RankPool) -> None:
    torch.manual_seed(0)
    first, _ = two.run(names_values_and_errors)
    assert first["names"]
    assert first["values"] == []
    assert first["block"] == (1, WIDTH)
    for use, way in (
        ("read", "full_parameters"),
        ("state_dict", "full_state_dict"),
        ("use", "full_parameters"),
    ):
        assert f"module.repro.{way}() on all ranks" in first[use]
