"""Tests of torch's GradScaler: all ranks unscale gradients alike and skip the same steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, WIDTH, Plain, error_of, layout_of, loss_fn

OVERFLOW_STEPS = (2, 5)
"""Steps in which one gradient element, in the shard of one rank, is infinite."""

Script = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Tensor], float]


def unscale_and_clip(
    module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: Tensor
) -> float:
    """Unscale and clip the gradients, as in PyTorch's documentation."""
    optimizer.zero_grad()
    scaler.scale(loss_fn(module, x)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()
    return float(norm)


def accumulate(
    module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: Tensor
) -> float:
    """Accumulate fewer passes than the layout declares, without reading the gradients."""
    for piece in x.chunk(2):
        scaler.scale(loss_fn(module, piece) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return 0.0


def clip_in_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: Tensor
) -> float:
    """Clip with the argument `clip` of `repro.parallelize`."""
    if not hasattr(module, "repro"):
        return unscale_and_clip(module, optimizer, scaler, x) * 0
    scaler.scale(loss_fn(module, x)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return 0.0


def train(script: Script, zero: int | None, fused: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Return the scale and the gradient norm of every step, and the final parameters."""
    torch.manual_seed(1)
    module: nn.Module = Plain()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), 0.01, eps=1e-4, fused=fused)
    step = 0

    def overflow(gradient: Tensor) -> Tensor:
        if step in OVERFLOW_STEPS:
            gradient = gradient.clone()
            gradient[0] = float("inf")
        return gradient

    module.blocks[1][0].bias.register_hook(overflow)
    mine = list(range(RANKS))
    if zero is not None:
        layout = layout_of(zero, 4 if script is accumulate else 1)
        clip = 0.05 if script is clip_in_step else 0.0
        module, optimizer = repro.parallelize(module, optimizer, layout, clip=clip)
        mine = [dist.get_rank()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    data = torch.randn(8, ROWS, RANKS, WIDTH, generator=torch.Generator().manual_seed(7))
    logged = []
    for step in range(8):
        norm = script(module, optimizer, scaler, data[step][:, mine].flatten(0, 1))
        logged += [scaler.get_scale(), norm if step not in OVERFLOW_STEPS else 0.0]
    if zero is None:
        return logged, {name: p.detach() for name, p in module.named_parameters()}
    return logged, module.repro.full_parameters()


@cache
def reference(script: Script) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    return train(script, None)


@STAGES
@pytest.mark.parametrize(
    ("script", "fused"), [(unscale_and_clip, False), (accumulate, False), (clip_in_step, True)]
)
def test_scaled_loss_trains_like_one_process(two: RankPool, script: Script, fused: bool, zero: int) -> None:
    logged, expected = reference(script)
    assert [logged[4], logged[10]] == [2.0**10, 2.0**10]  # both times doubled once, then halved
    for mine, parameters in two.run(train, script, zero, fused):
        assert mine == pytest.approx(logged, rel=1e-4)
        for name, value in expected.items():
            assert value.isfinite().all()
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


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
    module: nn.Module = Plain().half()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = repro.parallelize(module, optimizer, layout_of(zero))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_fn(module, torch.ones(1, WIDTH).half())).backward()
    scaler.step(optimizer)


@STAGES
def test_unscaling_fp16_gradients_raises_an_error(two: RankPool, zero: int) -> None:
    for message in two.run(error_of, scale_fp16, zero):
        assert "Leave the module in fp32 and use autocast" in message
