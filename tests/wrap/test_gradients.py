"""Tests of scripts that read or clip `p.grad`, accumulate, or skip steps: each trains like one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import (
    RANKS,
    ROWS,
    STAGES,
    WIDTH,
    Plain,
    Script,
    assert_script_trains_like_one,
    error_of,
    layout_of,
    loss_fn,
    parallelize_sgd,
)

Optim = torch.optim.Optimizer


def accumulate(
    passes: int,
    limit: float,
    module: nn.Module,
    optimizer: Optim,
    batches: list[Tensor],
    *,
    no_sync: bool = False,
    order: float = 2.0,
) -> list[float]:
    """Accumulate passes per step, of which the last step may have fewer, and clip the norm unless `limit` is 0."""
    norms = []
    for i, x in enumerate(batches):
        is_last = (i + 1) % passes == 0 or i == len(batches) - 1
        with module.no_sync() if no_sync and not is_last and hasattr(module, "repro") else nullcontext():
            (loss_fn(module, x) / passes).backward()
        if is_last:
            if limit:
                norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), limit, norm_type=order)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def clip_by_value(module: nn.Module, optimizer: Optim, batches: list[Tensor]) -> list[float]:
    for x in batches:
        optimizer.zero_grad()
        loss_fn(module, x).backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.005)
        optimizer.step()
    return []


def scale_by_hand(module: nn.Module, optimizer: Optim, batches: list[Tensor]) -> list[float]:
    """Scale the gradients in place, and log norms."""
    logged = []
    for x in batches:
        loss_fn(module, 8 * x).backward()
        for p in module.parameters():
            assert p.grad is not None
            p.grad.mul_(0.125)
        total = sum(p.grad.data.norm(2).item() ** 2 for p in module.parameters() if p.grad is not None)
        logged += [total**0.5, float(module.blocks[1][0].weight.grad.norm())]
        optimizer.step()
        optimizer.zero_grad()
    return logged


def skip_steps(module: nn.Module, optimizer: Optim, batches: list[Tensor]) -> list[float]:
    """Discard the gradients of some batches after their backward pass."""
    for i, x in enumerate(batches):
        loss_fn(module, x).backward()
        if i % 3 != 1:
            optimizer.step()
        (optimizer if i % 2 else module).zero_grad()
    return []


def scaler_off(module: nn.Module, optimizer: Optim, batches: list[Tensor]) -> list[float]:
    """Use a disabled GradScaler, as scripts for several precisions do."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x in batches:
        scaler.scale(loss_fn(module, x)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return []


def block_backward(module: nn.Module, optimizer: Optim, batches: list[Tensor]) -> list[float]:
    """Run backward passes for the parameters of one block."""
    for x in batches:
        loss_fn(module, x).backward(inputs=list(module.blocks[0].parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return []


clip_by_norm, two_passes = partial(accumulate, 1, 0.05), partial(accumulate, 2, 0.05)
clip_by_max = partial(accumulate, 1, 0.01, order=float("inf"))
three_passes, three_clipped_passes = partial(accumulate, 3, 0.0), partial(accumulate, 3, 0.05)
use_no_sync = partial(accumulate, 4, 0.0, no_sync=True)
DECLARED = {"micro_batch": ROWS, "global_batch": RANKS * ROWS * 3}
"""Layout keys that declare three passes per step; the last step has fewer."""


@pytest.mark.parametrize(
    ("script", "zero", "keys"),
    [
        *((script, zero, {}) for script in (clip_by_norm, clip_by_max, clip_by_value) for zero in range(4)),
        *((script, zero, {}) for script in (two_passes, three_passes, use_no_sync) for zero in range(4)),
        *((script, zero, {}) for script in (scale_by_hand, skip_steps, scaler_off) for zero in range(4)),
        *((script, zero, DECLARED) for script in (three_passes, three_clipped_passes) for zero in range(4)),
        *((block_backward, zero, {}) for zero in range(3)),
        (two_passes, 1, {"zero1_reduce": "all-reduce"}),
    ],
)
def test_script_trains_like_one_process(
    two: RankPool, script: Script, zero: int, keys: dict[str, Any]
) -> None:
    layout = Layout(dp=RANKS, zero=zero, **keys) if keys else layout_of(zero)
    assert_script_trains_like_one(two, script, layout)


MISUSES: dict[str, Callable[[nn.Module, Optim, Tensor], Any]] = {
    "replace": lambda m, o, x: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
    "read elements": lambda m, o, x: m.into.weight.grad.abs(),
    "clip shards": lambda m, o, x: nn.utils.clip_grad_norm_(
        [p for g in o.param_groups for p in g["params"]], 1.0
    ),
    "closure": lambda m, o, x: o.step(lambda: loss_fn(m, x)),
}
"""Uses after a backward pass and before a step."""


def misuse(name: str, zero: int) -> None:
    module, optimizer = parallelize_sgd(Plain(), layout_of(zero))
    x = torch.ones(1, WIDTH)
    loss_fn(module, x).backward()
    MISUSES[name](module, optimizer, x)
    optimizer.step()


def assign_gradients(zero: int) -> None:
    module, optimizer = parallelize_sgd(Plain(), layout_of(zero))
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(loss_fn(module, torch.ones(1, WIDTH)), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    optimizer.step()


def read_unreduced_gradient(zero: int) -> None:
    module, _ = parallelize_sgd(Plain(), layout_of(zero))
    with module.no_sync():
        loss_fn(module, torch.ones(1, WIDTH)).backward()
    module.into.weight.grad.abs()


def train_submodule(zero: int) -> None:
    module, optimizer = parallelize_sgd(Plain(), layout_of(zero))
    module.into(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()


def train_block(zero: int) -> None:
    block_backward(*parallelize_sgd(Plain(), layout_of(zero)), [torch.ones(1, WIDTH)])


@pytest.mark.parametrize(
    ("call", "stages", "message"),
    [
        (partial(misuse, "replace"), range(4), "into.weight.grad: replacing or removing a gradient"),
        (assign_gradients, (0, 2), "into.weight.grad: replacing or removing a gradient"),
        (read_unreduced_gradient, (0,), "or before the last backward pass of a step"),
        (partial(misuse, "read elements"), (1, 2, 3), "is not supported under zero = 1 to 3"),
        (train_submodule, (0, 1, 2), "Call the module itself (not one of its methods)"),
        (partial(misuse, "clip shards"), range(4), "Use module.parameters()"),
        (partial(misuse, "closure"), (0, 3), "Call the closure, then"),
        (train_block, (3,), "backward() for given parameters is not supported under zero = 3"),
    ],
)
def test_unsupported_uses_of_gradients_are_refused(
    two: RankPool, call: Callable[[int], None], stages: tuple[int, ...], message: str
) -> None:
    for zero in stages:
        for found in two.run(error_of, call, zero):
            assert message in found, zero


class NormedModel(nn.Module):
    """A model with batch norm and a buffer that the forward pass replaces."""

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
    """Return all buffers after two steps, and this rank's running mean before the last step."""
    torch.manual_seed(1)
    module, optimizer = parallelize_sgd(NormedModel(), layout_of(zero))
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        out = module(torch.randn(ROWS, WIDTH) + dist.get_rank())
        out.square().sum().backward()
        own = module.norm.running_mean.clone()
        optimizer.step()
    return {name: b.clone() for name, b in module.named_buffers()}, own


@STAGES
def test_all_ranks_have_the_buffers_of_rank_0(two: RankPool, zero: int) -> None:
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
