"""Tests of torch's GradScaler: all ranks unscale gradients alike and skip the same steps."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import repro
from tests.pool import RankPool
from tests.wrap.edge_models import (
    RANKS,
    STAGES,
    WIDTH,
    Plain,
    assert_same,
    assert_script_trains_like_one,
    error_of,
    layout_of,
    loss_fn,
    parallelize_sgd,
    run_script,
    script_reference,
)

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
    passes: int, clips: bool, module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]
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


one_pass, clip, accumulate = (partial(train_scaled, *given) for given in ((1, False), (1, True), (2, False)))


@STAGES
def test_scaled_loss_trains_like_one_process(two: RankPool, zero: int) -> None:
    logged, expected = script_reference(clip, Overflowing)
    assert [logged[4], logged[10]] == [2.0**10, 2.0**10]  # both times doubled once, then halved
    assert all(value.isfinite().all() for value in expected.values())
    assert_script_trains_like_one(two, clip, layout_of(zero), Overflowing)
    # The layout declares more passes than the script runs, and no gradient is read.
    assert_script_trains_like_one(two, accumulate, layout_of(zero, 4), Overflowing)
    # The argument `clip` of `repro.parallelize` clips in the step of a fused optimizer.
    for log, parameters in two.run(run_script, one_pass, layout_of(zero), Overflowing, 0.05, True):
        assert log[::2] == logged[::2]
        assert_same([parameters], expected, atol=1e-5)


def scales_of_a_tiny_module(zero: int) -> list[float]:
    """Return the loss scales for a module whose shard on rank 1 is empty."""
    module: nn.Module = nn.Linear(1, 1)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
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


def scale_fp16(zero: int) -> None:
    module, optimizer = parallelize_sgd(Plain().half(), layout_of(zero))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_fn(module, torch.ones(1, WIDTH).half())).backward()
    scaler.step(optimizer)


@STAGES
def test_unscaling_fp16_gradients_raises_an_error(two: RankPool, zero: int) -> None:
    for message in two.run(error_of, scale_fp16, zero):
        assert "Leave the module in fp32 and use autocast" in message
