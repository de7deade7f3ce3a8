"""Scripts that look at `p.grad`, clip it, accumulate without saying so, or skip a batch, train as they do alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, WIDTH, Plain, layout_of, message_of, once

Script = Callable[[nn.Module, torch.optim.Optimizer, list[Tensor]], list[float]]
"""What a script does with eight batches; returns what it logs."""


def by_norm(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    norms = []
    for x in batches:
        optimizer.zero_grad()
        once(module, x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        optimizer.step()
    return norms


def by_largest(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    norms = []
    for x in batches:
        once(module, x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.01, norm_type=float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def by_value(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    for x in batches:
        once(module, x).backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.005)
        optimizer.step()
        optimizer.zero_grad()
    return []


def scaled(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """By hand; and what scripts log."""
    logged = []
    for x in batches:
        once(module, 8 * x).backward()
        for p in module.parameters():
            assert p.grad is not None
            p.grad.mul_(0.125)
        total = sum(p.grad.data.norm(2).item() ** 2 for p in module.parameters() if p.grad is not None)
        logged += [total**0.5, float(module.blocks[1][0].weight.grad.norm())]
        optimizer.step()
        optimizer.zero_grad()
    return logged


def pairs(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Two passes a step, of which the layout knows nothing."""
    norms = []
    for i, x in enumerate(batches):
        (once(module, x) / 2).backward()
        if i % 2:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def windows(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Windows of three passes, of which the last is shorter."""
    for i, x in enumerate(batches):
        (once(module, x) / 3).backward()
        if i % 3 == 2 or i == len(batches) - 1:
            optimizer.step()
            optimizer.zero_grad()
    return []


def clipped_windows(
    module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> list[float]:
    """The last one is clipped before the passes are over that the layout speaks of."""
    norms = []
    for i, x in enumerate(batches):
        (once(module, x) / 3).backward()
        if i % 3 == 2 or i == len(batches) - 1:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def unsynchronized(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """With `no_sync`, as DistributedDataParallel's users do."""
    for i, x in enumerate(batches):
        last = i % 4 == 3
        with contextlib.nullcontext() if last else getattr(module, "no_sync", contextlib.nullcontext)():
            (once(module, x) / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return []


def skips(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Batches that are thrown away after their backward pass."""
    for i, x in enumerate(batches):
        once(module, x).backward()
        if i % 3 != 1:
            optimizer.step()
        (optimizer if i % 2 else module).zero_grad()
    return []


def no_scaler(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Of scripts that ask for one by the precision."""
    off = torch.amp.GradScaler("cpu", enabled=False)
    for x in batches:
        off.scale(once(module, x)).backward()
        off.unscale_(optimizer)
        off.step(optimizer)
        off.update()
        optimizer.zero_grad()
    return []


def train(script: Script, layout: Layout | None, pieces: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """What a script logs, and the parameters in the end; without a layout of one process with all samples."""
    torch.manual_seed(1)
    module: nn.Module = Plain()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
    data = torch.randn(8, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    if layout is None:
        return script(module, optimizer, [*data.flatten(1, 2)]), {
            name: p.detach() for name, p in module.named_parameters()
        }
    module, optimizer = repro.parallelize(module, optimizer, layout)
    return script(module, optimizer, [*data[:, dist.get_rank()]]), module.repro.full_parameters()


@cache
def alone(script: Script) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    return train(script, None)


SCRIPTS: list[Any] = [
    by_norm,
    by_largest,
    by_value,
    scaled,
    pairs,
    windows,
    clipped_windows,
    unsynchronized,
    skips,
    no_scaler,
]


@STAGES
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_as_it_does_alone(two: RankPool, script: Script, zero: int) -> None:
    logged, expected = alone(script)
    layouts = [layout_of(zero)]
    if script in (windows, clipped_windows):
        layouts.append(Layout(dp=RANKS, zero=zero, micro_batch=ROWS, global_batch=RANKS * ROWS * 3))
    for layout in layouts:
        for mine, parameters in two.run(train, script, layout):
            assert mine == pytest.approx(logged, rel=1e-4)
            for name, value in expected.items():
                torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_stage_1_as_in_february_2020_accumulates_too(two: RankPool) -> None:
    _, expected = alone(pairs)
    for _, parameters in two.run(train, pairs, Layout(dp=RANKS, zero=1, zero1_reduce="all-reduce")):
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


def one_block(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Backward passes for the parameters of one block."""
    for x in batches:
        once(module, x).backward(inputs=list(module.blocks[0].parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return []


@pytest.mark.parametrize("zero", range(3))
def test_backward_for_given_parameters(two: RankPool, zero: int) -> None:
    _, expected = alone(one_block)
    for _, parameters in two.run(train, one_block, layout_of(zero)):
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


def replaced(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Gradients that no backward pass reduced."""
    once(module, batches[0]).backward()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return []


def by_hand(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    parameters = list(module.parameters())
    for p, gradient in zip(
        parameters, torch.autograd.grad(once(module, batches[0]), parameters), strict=True
    ):
        p.grad = gradient
    optimizer.step()
    return []


def too_early(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """A look at what is not reduced yet."""
    with module.no_sync():
        once(module, batches[0]).backward()
    return module.into.weight.grad.abs().flatten().tolist()


def histogram(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """What one rank cannot know."""
    once(module, batches[0]).backward()
    return module.into.weight.grad.abs().flatten().tolist()


def method(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """A loss of something else than the module's output."""
    module.into(batches[0]).sum().backward()
    optimizer.step()
    return []


def closure(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    optimizer.step(lambda: once(module, batches[0]))
    return []


def optimizers_own(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Clipping what the optimizer has, of which a rank has some only."""
    once(module, batches[0]).backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    return []


@pytest.mark.parametrize(
    ("script", "zero", "message"),
    [
        *((replaced, zero, "into.weight.grad: replacing or removing a gradient") for zero in range(4)),
        *((by_hand, zero, "into.weight.grad: replacing or removing a gradient") for zero in (0, 2)),
        (too_early, 0, "or before the last backward pass of a step"),
        *((histogram, zero, "is not supported under zero = 1 to 3") for zero in (1, 2, 3)),
        *((method, zero, "Call the module itself (not one of its methods)") for zero in (0, 1, 2)),
        *((optimizers_own, zero, "Use module.parameters()") for zero in range(4)),
        *((closure, zero, "Call the closure, then") for zero in (0, 3)),
        (one_block, 3, "backward() for given parameters is not supported under zero = 3"),
    ],
)
def test_what_the_step_would_not_see_is_refused(
    two: RankPool, script: Script, zero: int, message: str
) -> None:
    for found in two.run(message_of, train, script, layout_of(zero)):
        assert message in found


class Normed(nn.Module):
    """A batch norm, and a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer(
            "constant", torch.full((), float(dist.get_rank() if dist.is_initialized() else 0))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(x))
        self.last = x.detach().mean(0)
        return x


def buffers_after_steps(zero: int) -> tuple[dict[str, Tensor], Tensor]:
    """Buffers after two steps, and this rank's own mean of the last batch."""
    torch.manual_seed(1)
    module: nn.Module = Normed()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = repro.parallelize(module, optimizer, layout_of(zero))
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        out = module(torch.randn(ROWS, WIDTH) + dist.get_rank())
        out.square().sum().backward()
        own = module.norm.running_mean.clone()
        optimizer.step()
    return {name: b.clone() for name, b in module.named_buffers()}, own


@STAGES
def test_buffers_are_those_of_rank_0(two: RankPool, zero: int) -> None:
    (first, own), (second, other) = two.run(buffers_after_steps, zero)
    assert not torch.equal(own, other)
    assert torch.equal(first["norm.running_mean"], own)
    assert first.keys() == {
        "last",
        "constant",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    for name, value in first.items():
        assert torch.equal(second[name], value), name
