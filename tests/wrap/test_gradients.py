"""Tests of scripts that read or clip `p.grad`, accumulate, or skip steps: each trains like one process."""

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
from tests.wrap.edge_models import RANKS, ROWS, STAGES, WIDTH, Plain, error_of, layout_of, loss_fn

Script = Callable[[nn.Module, torch.optim.Optimizer, list[Tensor]], list[float]]
"""Training script for eight batches; returns its logged values."""


def clip_by_norm(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    norms = []
    for x in batches:
        optimizer.zero_grad()
        loss_fn(module, x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        optimizer.step()
    return norms


def clip_by_max(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    norms = []
    for x in batches:
        loss_fn(module, x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.01, norm_type=float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clip_by_value(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    for x in batches:
        loss_fn(module, x).backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.005)
        optimizer.step()
        optimizer.zero_grad()
    return []


def scale_by_hand(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
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


def two_passes(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Accumulate two passes per step; the layout does not declare them."""
    norms = []
    for i, x in enumerate(batches):
        (loss_fn(module, x) / 2).backward()
        if i % 2:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def three_passes(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Accumulate three passes per step; the last step has two."""
    for i, x in enumerate(batches):
        (loss_fn(module, x) / 3).backward()
        if i % 3 == 2 or i == len(batches) - 1:
            optimizer.step()
            optimizer.zero_grad()
    return []


def accumulate_and_clip(
    module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> list[float]:
    """Clip the last step's gradients after fewer passes than the layout declares."""
    norms = []
    for i, x in enumerate(batches):
        (loss_fn(module, x) / 3).backward()
        if i % 3 == 2 or i == len(batches) - 1:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def use_no_sync(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Accumulate four passes per step with `no_sync`, as under DistributedDataParallel."""
    for i, x in enumerate(batches):
        last = i % 4 == 3
        with contextlib.nullcontext() if last else getattr(module, "no_sync", contextlib.nullcontext)():
            (loss_fn(module, x) / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return []


def skip_steps(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Discard the gradients of some batches after their backward pass."""
    for i, x in enumerate(batches):
        loss_fn(module, x).backward()
        if i % 3 != 1:
            optimizer.step()
        (optimizer if i % 2 else module).zero_grad()
    return []


def scaler_off(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Use a disabled GradScaler, as scripts for several precisions do."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x in batches:
        scaler.scale(loss_fn(module, x)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return []


def train(script: Script, layout: Layout | None, pieces: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Run a script; return its log and the final parameters. Without a layout, one process has all samples."""
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
def reference(script: Script) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    return train(script, None)


SCRIPTS: list[Any] = [
    clip_by_norm,
    clip_by_max,
    clip_by_value,
    scale_by_hand,
    two_passes,
    three_passes,
    accumulate_and_clip,
    use_no_sync,
    skip_steps,
    scaler_off,
]


@STAGES
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_trains_like_one_process(two: RankPool, script: Script, zero: int) -> None:
    logged, expected = reference(script)
    layouts = [layout_of(zero)]
    if script in (three_passes, accumulate_and_clip):
        layouts.append(Layout(dp=RANKS, zero=zero, micro_batch=ROWS, global_batch=RANKS * ROWS * 3))
    for layout in layouts:
        for mine, parameters in two.run(train, script, layout):
            assert mine == pytest.approx(logged, rel=1e-4)
            for name, value in expected.items():
                torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_stage_1_with_all_reduce_accumulates_gradients(two: RankPool) -> None:
    _, expected = reference(two_passes)
    for _, parameters in two.run(train, two_passes, Layout(dp=RANKS, zero=1, zero1_reduce="all-reduce")):
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


def block_backward(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Run backward passes for the parameters of one block."""
    for x in batches:
        loss_fn(module, x).backward(inputs=list(module.blocks[0].parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return []


@pytest.mark.parametrize("zero", range(3))
def test_backward_for_given_parameters_trains_like_one_process(two: RankPool, zero: int) -> None:
    _, expected = reference(block_backward)
    for _, parameters in two.run(train, block_backward, layout_of(zero)):
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


def replace_grads(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Replace the reduced gradients by zeros."""
    loss_fn(module, batches[0]).backward()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return []


def assign_grads(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    parameters = list(module.parameters())
    for p, gradient in zip(
        parameters, torch.autograd.grad(loss_fn(module, batches[0]), parameters), strict=True
    ):
        p.grad = gradient
    optimizer.step()
    return []


def read_unreduced(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Read a gradient before its reduction."""
    with module.no_sync():
        loss_fn(module, batches[0]).backward()
    return module.into.weight.grad.abs().flatten().tolist()


def read_elements(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Read gradient elements, which are partitioned over the ranks."""
    loss_fn(module, batches[0]).backward()
    return module.into.weight.grad.abs().flatten().tolist()


def submodule_loss(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Compute the loss from the output of a submodule."""
    module.into(batches[0]).sum().backward()
    optimizer.step()
    return []


def closure_step(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    optimizer.step(lambda: loss_fn(module, batches[0]))
    return []


def clip_shards(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Clip the optimizer's parameters, which are shards of this rank."""
    loss_fn(module, batches[0]).backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    return []


@pytest.mark.parametrize(
    ("script", "zero", "message"),
    [
        *((replace_grads, zero, "into.weight.grad: replacing or removing a gradient") for zero in range(4)),
        *((assign_grads, zero, "into.weight.grad: replacing or removing a gradient") for zero in (0, 2)),
        (read_unreduced, 0, "or before the last backward pass of a step"),
        *((read_elements, zero, "is not supported under zero = 1 to 3") for zero in (1, 2, 3)),
        *((submodule_loss, zero, "Call the module itself (not one of its methods)") for zero in (0, 1, 2)),
        *((clip_shards, zero, "Use module.parameters()") for zero in range(4)),
        *((closure_step, zero, "Call the closure, then") for zero in (0, 3)),
        (block_backward, 3, "backward() for given parameters is not supported under zero = 3"),
    ],
)
def test_unsupported_uses_of_gradients_are_refused(
    two: RankPool, script: Script, zero: int, message: str
) -> None:
    for found in two.run(error_of, train, script, layout_of(zero)):
        assert message in found


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
    module: nn.Module = NormedModel()
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
