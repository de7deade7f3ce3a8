"""Unusual modules, loss functions and a training loop for the tests of `repro.parallelize`."""

from __future__ import annotations

import time
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
from repro.parallel.comm import Work
from repro.parallel.zero.flat_buffer import Bucket
from tests.pool import RankPool

WIDTH, ROWS, STEPS, RANKS = 8, 4, 6, 2


class Plain(nn.Module):
    """A model of three residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Stateful(Plain):
    """A model with a tied matrix, frozen and empty parameters, a buffer that is not persistent, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.into.weight
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("passing", torch.zeros(()), persistent=False)
        self.steps = 0

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, steps: int) -> None:
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return self.out(self.norm(super().forward(x)))


class Stack(nn.Module):
    """A model of an input layer and four linear blocks, with or without activation checkpointing."""

    def __init__(self, reentrant: bool | None = None, bias: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            y = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = torch.tanh(y)
        return x


class Scaled(nn.Module):
    """A block whose input data select its used parameters and their order."""

    def __init__(self, passes: bool) -> None:
        super().__init__()
        self.passes = passes
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, positive: bool) -> Tensor:
        if positive and self.passes:
            return x  # the block's parameters get no gradient; its output is another module's
        x = torch.tanh(self.second(self.first(x)) if positive else self.first(self.second(x)))
        return x * self.scale if positive else x


class DataDependent(nn.Module):
    """A model whose ranks use different parameters of the same modules; block 0 runs twice and may be detached."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Scaled(passes=i == 1) for i in range(4))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x.sum() > 0)
        x = torch.tanh(self.into(x))
        for block in self.blocks:
            x = x + block(x, positive)
        y = self.blocks[0](x, not positive)
        if positive:
            y = y.detach()  # the second use of block 0 gets no gradient
        return x + y + (self.bias if positive else 0.0)


class Reentrant(Plain):
    """A model with two blocks that reentrant checkpoints run twice, and one with and without a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        reentrant_checkpoint = partial(checkpoint, use_reentrant=True)
        a, b, c = self.blocks
        x = self.into(x)
        x = x + reentrant_checkpoint(a, x)
        x = reentrant_checkpoint(b, x) + reentrant_checkpoint(c, x)
        x = x + reentrant_checkpoint(c, reentrant_checkpoint(a, x))
        return self.out(b(x))


class Segments(nn.Module):
    """A model with two blocks per checkpoint, reentrant or not; one block gets a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for i in (0, 2, 4):

            def two_blocks(x: Tensor, i: int = i) -> Tensor:
                return torch.tanh(self.blocks[i + 1](input=torch.tanh(self.blocks[i](x))))

            x = x + checkpoint(two_blocks, x, use_reentrant=i != 2)
        return x


class Containers(nn.Module):
    """A model with blocks in dictionaries and nested lists, and parameters in containers and a forwardless module."""

    def __init__(self) -> None:
        super().__init__()

        def linear() -> nn.Module:
            return nn.Linear(WIDTH, WIDTH)

        self.dictionaries = nn.ModuleList(nn.ModuleDict({"up": linear(), "down": linear()}) for _ in range(2))
        self.nested = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(2))
        self.scales = nn.ModuleList([nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])])
        self.biases = nn.ModuleList([nn.ParameterDict({"b": torch.zeros(WIDTH)})])
        holder = nn.Module()
        holder.inner = linear()
        holder.own = nn.Parameter(torch.ones(WIDTH))
        self.holders = nn.ModuleList([holder])

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.dictionaries:
            x = x + pair["down"](torch.tanh(pair["up"](x)))
        for group in self.nested:
            for layer in group:
                x = torch.tanh(layer(x))
        (scales,), (biases,), (holder,) = self.scales, self.biases, self.holders
        return holder.inner(x * scales[0] * scales[1]) * holder.own + biases["b"]


LossFn = Callable[[nn.Module, Tensor], Tensor]


def loss_fn(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def evaluation_before_backward(module: nn.Module, x: Tensor) -> Tensor:
    """Evaluate before the forward pass, and between the forward pass and its backward pass."""
    with torch.no_grad():
        before = loss_fn(module, x)
    loss = loss_fn(module, x)
    with torch.no_grad():
        assert torch.equal(loss_fn(module, x), before)
        module(-x)
    return loss


def train(
    kind: type[nn.Module],
    layout: Layout | None,
    loss_of: LossFn = loss_fn,
    after: Callable[[nn.Module, int], None] | None = None,
    late: bool = False,
) -> dict[str, Tensor]:
    """Return the parameters after training; without a layout, one process trains on the samples of all ranks in turn.

    `after` is called after each step. With `late`, rank 1 sends its updated parameters late.
    """
    torch.manual_seed(1)
    module = kind()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    mine = list(range(RANKS))
    pieces = 1
    if layout is not None:
        module, optimizer = repro.parallelize(module, optimizer, layout)
        mine, pieces = [dist.get_rank()], layout.accumulation
        if late:
            delay_gathers(module)
    data = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        inputs = torch.randn(RANKS, ROWS, WIDTH, generator=data)
        for piece in range(pieces):
            share = [inputs[r].chunk(pieces)[piece] for r in mine]
            (sum(loss_of(module, x) for x in share) / len(mine) / pieces).backward()  # type: ignore[union-attr]
        optimizer.step()
        if after is not None:
            after(module, step)
        optimizer.zero_grad()
    if layout is None:
        return {name: p.detach().clone() for name, p in module.named_parameters()}
    return module.repro.full_parameters()


def delay_gathers(module: nn.Module) -> None:
    """Delay the all-gathers of rank 1, so that the other ranks wait for its shards."""

    def gather_late(bucket: Bucket) -> Work:
        time.sleep(0.02)
        return Bucket.gather(bucket)

    if dist.get_rank():
        for bucket in module.repro.buckets:
            vars(bucket)["gather"] = partial(gather_late, bucket)


@cache
def reference(kind: type[nn.Module], loss_of: LossFn = loss_fn) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train(kind, None, loss_of)


def assert_same(
    found: list[dict[str, Tensor]], expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    for mine in found:
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(mine[name], value, rtol=rtol, atol=atol, msg=name)


def parallelize_sgd(
    module: nn.Module, layout: Layout, lr: float = 0.1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return repro.parallelize(module, torch.optim.SGD(module.parameters(), lr=lr), layout)


def layout_of(zero: int, pieces: int = 1, bucket_bytes: int = 300) -> Layout:
    """Return a layout whose buckets hold one linear layer, so that each layer is reduced separately."""
    rows = ROWS // pieces
    return Layout(dp=RANKS, zero=zero, micro_batch=rows, global_batch=RANKS * ROWS, bucket_bytes=bucket_bytes)


STAGES = pytest.mark.parametrize("zero", range(4))


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    """Return the message of the error that a call raises, or an empty string."""
    try:
        call(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


Script = Callable[[nn.Module, torch.optim.Optimizer, list[Tensor]], list[float]]
"""Training script for eight batches; returns its logged values."""


def run_script(
    script: Script,
    layout: Layout | None,
    kind: Callable[[], nn.Module] = Plain,
    clip: float = 0.0,
    fused: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    """Run a script; return its log and the final parameters. Without a layout, one process has all samples."""
    torch.manual_seed(1)
    module = kind()
    dtype = next(module.parameters()).dtype
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), 0.01, eps=1e-4, fused=fused)
    data = torch.randn(8, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(7), dtype=dtype)
    if layout is None:
        log = script(module, optimizer, [*data.flatten(1, 2)])
        return log, {name: p.detach() for name, p in module.named_parameters()}
    module, optimizer = repro.parallelize(module, optimizer, layout, clip=clip)
    return script(module, optimizer, [*data[:, dist.get_rank()]]), module.repro.full_parameters()


@cache
def script_reference(script: Script, kind: Callable[[], nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    return run_script(script, None, kind)


def assert_script_trains_like_one(
    ranks: RankPool,
    script: Script,
    layout: Layout,
    kind: Callable[[], nn.Module] = Plain,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    logged, expected = script_reference(script, kind)
    for log, parameters in ranks.run(run_script, script, layout, kind):
        assert log == pytest.approx(logged, rel=rtol)
        assert_same([parameters], expected, rtol, atol)
