"""repro.parallelize of a module that is trained in part (low-rank adapters): stage 3 partitions the frozen part too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import repro
from repro.config import Layout
from repro.config.enums import Category
from repro.measure.memory import MemoryTracker
from repro.parallel.zero.partition import ALIGNMENT
from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Plain,
    alone,
    assert_same,
    evaluate_between,
    layout_of,
    message_of,
    once,
    train,
)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 2)
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class LoRA(nn.Module):
    """Blocks with adapters, one that is frozen whole between them, and frozen parameters outside blocks."""

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
    """Each block is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=i == 2)


@STAGES
@pytest.mark.parametrize("kind", [LoRA, Checkpointed])
def test_adapters_train_as_in_one_process(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero)), alone(kind))
    assert_same(two.run(train, kind, layout_of(zero, 2)), alone(kind))
    assert_same(two.run(train, kind, layout_of(zero), evaluate_between), alone(kind))


class Thawing(Plain):
    """Counts the steps, for what is frozen in some of them."""

    steps = 0


def freeze_for_a_while(module: nn.Module) -> None:
    """A block after the first step, and all that surrounds blocks after the second; trained again after the fourth."""
    module.steps += 1  # type: ignore[operator]
    module.blocks[1].requires_grad_(not 1 <= module.steps < 4)  # type: ignore[operator]
    module.into.requires_grad_(not 2 <= module.steps < 4)  # type: ignore[operator]


@STAGES
def test_what_is_frozen_later_is_left_alone(two: RankPool, zero: int) -> None:
    expected = train(Thawing, None, after=freeze_for_a_while)
    assert not torch.equal(expected["into.weight"], alone(Thawing)["into.weight"])
    for pieces in (1, 2):
        assert_same(two.run(train, Thawing, layout_of(zero, pieces), once, freeze_for_a_while), expected)


def states_held(precision: str) -> tuple[dict[str, int], dict[str, int]]:
    """Live bytes by category after two steps on this rank, and the most at any moment."""
    with MemoryTracker() as tracker:
        module: nn.Module = LoRA()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        layout = Layout(dp=torch.distributed.get_world_size(), zero=3, precision=precision)
        module, optimizer = repro.parallelize(module, optimizer, layout)
        x = torch.ones(2, WIDTH, dtype=module.scale.dtype)
        for _ in range(2):
            once(module, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        held = tracker.live()
    return held, tracker.most


def shard_of(*numels: int, ranks: int) -> int:
    """Elements of one rank's shard of parameters that lie end to end."""
    return -(-sum(numels) // (ranks * ALIGNMENT)) * ALIGNMENT


@pytest.mark.parametrize("pool", ["two", "four"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_holds_its_part_of_what_is_frozen_to_the_byte(
    request: pytest.FixtureRequest, pool: str, precision: str
) -> None:
    """Values alone, Psi / Nd of them: no gradients, no master weights."""
    ranks: RankPool = request.getfixturevalue(pool)
    n, size = ranks.world, 4 if precision == "fp32" else 2
    linear = WIDTH * WIDTH + WIDTH
    adapters = 3 * shard_of(2 * WIDTH, 2 * WIDTH, ranks=n) + shard_of(WIDTH, ranks=n)
    frozen = 5 * shard_of(linear, ranks=n)
    order = 8 * shard_of(WIDTH, ranks=n)  # int64
    outer = n * (size * (shard_of(linear, ranks=n) + shard_of(WIDTH, ranks=n)) + order)
    block = n * size * (shard_of(linear, ranks=n) + shard_of(2 * WIDTH, 2 * WIDTH, ranks=n))
    for held, most in ranks.run(states_held, precision):
        assert held[Category.PARAMETERS] == size * (adapters + frozen) + order
        assert held[Category.GRADIENTS] == size * adapters
        assert held[Category.OPTIMIZER] == (0 if precision == "fp32" else 4 * adapters)
        assert held["other"] < size * linear  # what the module was made of is gone
        assert most[Category.PARAMETERS] <= held[Category.PARAMETERS] + outer + 2 * block


def names_and_refusals() -> dict[str, Any]:
    module: nn.Module = LoRA()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    module, optimizer = repro.parallelize(module, optimizer, layout_of(3))
    after = module.repro.full_parameters()
    return {
        "names": list(after) == list(before),
        "values": [name for name in before if not torch.equal(after[name], before[name])],
        "read": message_of(module.into.weight.norm),
        "state_dict": message_of(module.blocks[1].state_dict),
        "use": message_of(module.into, torch.ones(1, WIDTH)),
        "block": module.blocks[1](torch.ones(1, WIDTH)).shape,
    }


def test_frozen_parameters_are_parameters_too(two: RankPool) -> None:
    torch.manual_seed(0)
    first, _ = two.run(names_and_refusals)
    assert first["names"]
    assert first["values"] == []
    for habit, way in {
        "read": "full_parameters",
        "state_dict": "full_state_dict",
        "use": "full_parameters",
    }.items():
        assert f"module.repro.{way}() on all ranks" in first[habit]
    assert first["block"] == (1, WIDTH)
