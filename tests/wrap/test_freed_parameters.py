"""Tests of stage 3: reads of released parameters, and ranks that use different modules in a pass, raise errors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import RankPool
from tests.wrap.edge_models import (
    RANKS,
    ROWS,
    WIDTH,
    Plain,
    delay_gathers,
    error_of,
    layout_of,
    loss_fn,
    parallelize_sgd,
)

WEIGHT_USES: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda w: w.norm(),
    "print": str,
    "format": lambda w: f"{w}",
    "numpy": lambda w: w.detach().numpy(),
    "item": lambda w: w[0, 0].item(),
    "save": lambda w: torch.save(w, io.BytesIO()),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "average": lambda w: torch.zeros(WIDTH, WIDTH).lerp_(w.data, 0.1),
    "average of lists": lambda w: torch._foreach_lerp_([torch.zeros(WIDTH, WIDTH)], [w], 0.1),
    "write": lambda w: nn.init.zeros_(w),
    "linear": lambda w: nn.functional.linear(torch.ones(WIDTH), w),
    "cast": lambda w: w.to(torch.float64),
    "alias": lambda w: w.view(-1),
    "address": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage(),
}
"""Uses of a weight, each by another function of torch."""


def error_messages() -> list[tuple[str, str]]:
    """Return the error of every use before training, between forward and backward, and after a step."""
    module, optimizer = parallelize_sgd(Plain(), layout_of(3))
    weight = module.blocks[0][0].weight
    found = [(name, error_of(use, weight)) for name, use in WEIGHT_USES.items()]
    loss = loss_fn(module, torch.ones(1, WIDTH))
    found += [(name, error_of(use, weight)) for name, use in WEIGHT_USES.items()]
    loss.backward()
    optimizer.step()
    return found + [(name, error_of(use, weight)) for name, use in WEIGHT_USES.items()]


def test_released_parameter_raises_an_error_on_every_use(two: RankPool) -> None:
    for found in two.run(error_messages):
        assert len(found) == 3 * len(WEIGHT_USES)
        for name, message in found:
            assert "Call module.repro.full_parameters() on all ranks" in message, name


def metadata_and_hooks() -> list[Any]:
    """Return hook calls and metadata of a released parameter."""
    module, _ = parallelize_sgd(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), layout_of(3))
    weight = module[0].weight
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    module.register_forward_hook(lambda *_: seen.append(isinstance(weight, nn.Parameter)))
    module[0].register_forward_pre_hook(lambda block, inputs: seen.append(float(block.weight.norm()) > 0))
    loss_fn(module, torch.ones(1, WIDTH)).backward()
    zeros = torch.zeros_like(weight)
    return [
        *seen,
        (weight.shape, weight.numel(), weight.dtype, weight.device.type, weight.dim(), len(weight)),
        (zeros.shape, type(zeros)),
        sum(p.numel() for p in module.parameters() if p.requires_grad),
        weight in {weight},
    ]


def test_released_parameter_retains_metadata_and_hooks(two: RankPool) -> None:
    square = torch.Size((WIDTH, WIDTH))
    for found in two.run(metadata_and_hooks):
        assert found == [
            *(True, True, square),
            (square, WIDTH**2, torch.float32, "cpu", 2, WIDTH),
            (square, Tensor),
            2 * WIDTH * (WIDTH + 1),
            True,
        ]


class Translator(nn.Module):
    """An encoder and a decoder that share an embedding; `generate` runs outside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        blocks, norm = nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), nn.LayerNorm(WIDTH)
        self.encoder = nn.ModuleDict({"embed": self.embedding, "blocks": blocks, "norm": norm})
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def encode(self, x: Tensor) -> Tensor:
        x = self.encoder["embed"](x)
        for block in self.encoder["blocks"]:
            x = torch.tanh(block(x))
        return self.encoder["norm"](x)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = self.encode(x) if memory is None else memory
        y = self.embedding(x) + memory
        for block in self.blocks:
            y = block(y)
        return self.head(y)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        memory = self.encode(x)
        for _ in range(3):
            x = self(x, memory).argmax(-1)
        return self.head(memory) + self.blocks[1].linear1(memory).sum() + self(x)


def generated_logits(late: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the generated logits after each step, and those of a stock module; with `late`, rank 1 sends late."""
    torch.manual_seed(0)
    module, optimizer = parallelize_sgd(Translator(), layout_of(3))
    if late:
        delay_gathers(module)
    stock, x, found = Translator(), torch.arange(10).view(5, 2), []
    for _ in range(3):
        loss_fn(module, x).backward()
        optimizer.step()
        stock.load_state_dict(module.repro.full_parameters(), strict=False)  # the embedding has two names
        found.append((module.generate(x), stock.generate(x)))
    return found


@pytest.mark.parametrize("late", [False, True])
def test_submodules_run_without_gradients_outside_forward(two: RankPool, late: bool) -> None:
    for mine in two.run(generated_logits, late):
        for found, expected in mine:
            torch.testing.assert_close(found, expected)


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
