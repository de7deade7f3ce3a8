"""Tests of scripts that read, clip or scale gradients, accumulate, or skip steps: each trains like one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import (
    RANKS,
    ROWS,
    STAGES,
    WIDTH,
    Plain,
    Script,
    assert_same,
    assert_script_trains_like_one,
    layout_of,
    loss_fn,
    parallelize_sgd,
    run_script,
    script_reference,
)

Optim = torch.optim.Optimizer


def clip_norm(limit: float, module: nn.Module, order: float = 2.0) -> list[float]:
    return [float(nn.utils.clip_grad_norm_(module.parameters(), limit, norm_type=order))]


def clip_values(module: nn.Module) -> list[float]:
    nn.utils.clip_grad_value_(module.parameters(), 0.005)
    return []


def scale_by_hand(module: nn.Module) -> list[float]:
    """Scale the gradients in place; return the norms of all gradients and of one gradient."""
    for p in module.parameters():
        p.grad.mul_(0.125)
    total = sum(p.grad.data.norm(2).item() ** 2 for p in module.parameters())
    return [total**0.5, float(module.blocks[1][0].weight.grad.norm())]


def accumulate(
    passes: int,
    change: Callable[[nn.Module], list[float]] | None,
    module: nn.Module,
    optimizer: Optim,
    batches: list[Tensor],
    no_sync: bool = False,
) -> list[float]:
    """Accumulate passes per step, of which the last step may have fewer, and change the gradients before the step."""
    logged = []
    for i, x in enumerate(batches):
        is_last = (i + 1) % passes == 0 or i == len(batches) - 1
        with module.no_sync() if no_sync and not is_last and hasattr(module, "repro") else nullcontext():
            (loss_fn(module, x) / passes).backward()
        if is_last:
            logged += change(module) if change else []
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
    for x in batches:
        loss_fn(module, x).backward(inputs=list(module.blocks[0].parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return []


one_pass, clipped = partial(accumulate, 1, None), partial(accumulate, 1, partial(clip_norm, 0.05))
changed = [clipped, *(partial(accumulate, 1, change) for change in (clip_values, scale_by_hand))]
changed += [partial(accumulate, 1, partial(clip_norm, 0.01, order=float("inf")))]
two_clipped_passes = partial(accumulate, 2, partial(clip_norm, 0.05))
three_passes, three_clipped_passes = (
    partial(accumulate, 3, None),
    partial(accumulate, 3, partial(clip_norm, 0.05)),
)
use_no_sync = partial(accumulate, 4, None, no_sync=True)
DECLARED = {"micro_batch": ROWS, "global_batch": RANKS * ROWS * 3}
"""Layout keys that declare three passes per step; the last step has fewer."""


@pytest.mark.parametrize(
    ("script", "zero", "keys"),
    [
        *((script, zero, {}) for script in (*changed, skip_steps, scaler_off) for zero in range(4)),
        *(
            (script, zero, {})
            for script in (two_clipped_passes, three_passes, use_no_sync)
            for zero in range(4)
        ),
        *((script, zero, DECLARED) for script in (three_passes, three_clipped_passes) for zero in range(4)),
        *((block_backward, zero, {}) for zero in range(3)),
        (two_clipped_passes, 1, {"zero1_reduce": "all-reduce"}),
    ],
)
def test_script_trains_like_one_process(
    two: RankPool, script: Script, zero: int, keys: dict[str, Any]
) -> None:
    layout = Layout(dp=RANKS, zero=zero, **keys) if keys else layout_of(zero)
    assert_script_trains_like_one(two, script, layout)


@STAGES
@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_argument_clip_equals_clipping_by_the_script(two: RankPool, limit: float, zero: int) -> None:
    """A gradient below the limit is not scaled up."""
    _, expected = script_reference(partial(accumulate, 1, partial(clip_norm, limit)), Plain)
    for _, parameters in two.run(run_script, one_pass, layout_of(zero), Plain, limit):
        assert_same([parameters], expected, atol=1e-5)


class NormedModel(nn.Module):
    """A model with batch norm and a buffer that the forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("constant", torch.tensor(float(dist.get_rank())))

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
    for name, value in first.items():
        assert torch.equal(second[name], value), name


OVERFLOW_STEPS = (2, 5)
"""Steps in which one gradient element, in the shard of one rank, is infinite."""


class Overflowing(Plain):
    """`Plain` with a hook that makes a gradient element infinite in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.blocks[1][0].bias.register_hook(self.overflow)

    def overflow(self, gradient: Tensor) -> Tensor:
        if self.step not in OVERFLOW_STEPS:
            return gradient
        return torch.cat([torch.full((1,), float("inf")), gradient[1:]])


def train_scaled(
    passes: int, clips: bool, module: nn.Module, optimizer: Optim, batches: list[Tensor]
) -> list[float]:
    """Train with scaled losses, as in PyTorch's documentation; return the scale and the norm after every step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    logged = []
    for step, x in enumerate(batches):
        module.step = step  # type: ignore[assignment]
        optimizer.zero_grad()
        for piece in x.chunk(passes):
            scaler.scale(loss_fn(module, piece) / passes).backward()
        norm = 0.0
        if clips:
            scaler.unscale_(optimizer)
            norm = float(nn.utils.clip_grad_norm_(module.parameters(), 0.05))
        scaler.step(optimizer)
        scaler.update()
        logged += [scaler.get_scale(), norm if step not in OVERFLOW_STEPS else 0.0]
    return logged


scaled, scaled_and_clipped, scaled_in_two = (
    partial(train_scaled, *given) for given in ((1, False), (1, True), (2, False))
)


@STAGES
def test_scaled_loss_trains_like_one_process(two: RankPool, zero: int) -> None:
    logged, expected = script_reference(scaled_and_clipped, Overflowing)
    assert [logged[4], logged[10]] == [2.0**10, 2.0**10]  # both times doubled once, then halved
    assert all(value.isfinite().all() for value in expected.values())
    assert_script_trains_like_one(two, scaled_and_clipped, layout_of(zero), Overflowing)
    # The layout declares more passes than the script runs, and no gradient is read.
    assert_script_trains_like_one(two, scaled_in_two, layout_of(zero, 4), Overflowing)
    # The argument `clip` of `repro.parallelize` clips in the step of a fused optimizer.
    for log, parameters in two.run(run_script, scaled, layout_of(zero), Overflowing, 0.05, True):
        assert log[::2] == logged[::2]
        assert_same([parameters], expected, atol=1e-5)


def scales_of_a_tiny_module(zero: int) -> list[float]:
    """Return the loss scales for a module whose shard on rank 1 is empty."""
    module: nn.Module = nn.Linear(1, 1)
    optimizer: Optim = torch.optim.AdamW(module.parameters(), lr=0.01)
    module, optimizer = repro.parallelize(module, optimizer, layout_of(zero))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    found = []
    for scale in (1.0, float("inf"), 1.0):
        scaler.scale(scale * loss_fn(module, torch.ones(1, 1))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, norm_type=float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.repro.full_state_dict())  # type: ignore[attr-defined]
    return found


@STAGES
def test_rank_with_empty_shard_updates_the_loss_scale(two: RankPool, zero: int) -> None:
    assert two.run(scales_of_a_tiny_module, zero) == [[8.0, 4.0, 8.0]] * RANKS
