"""Tests of `repro.parallelize`: a stock module under DP and ZeRO 1-3 trains like one process, in every dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import ConfigError, Layout
from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Plain,
    Stateful,
    assert_same,
    assert_script_trains_like_one,
    layout_of,
    parallelize_sgd,
)
from tests.wrap.stock_models import BATCH, MODELS, Tied, optimizer_of, train_stock
from tests.wrap.test_gradients import clipped


@cache
def reference(model: str, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    return train_stock(model, optimizer, None)


def assert_trained_like_one(found: list[Any], model: str, optimizer: str) -> None:
    losses, parameters = reference(model, optimizer)
    mean = torch.tensor([result[0] for result in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=0.0)
    assert_same([mine for _, mine in found], parameters, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
@STAGES
def test_stock_module_trains_like_one_process(two: RankPool, model: str, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, micro_batch=BATCH // 2, bucket_bytes=600)
    assert_trained_like_one(two.run(train_stock, model, "adamw", layout), model, "adamw")


@pytest.mark.parametrize("model", ["tied", "unused"])
@STAGES
def test_sgd_with_accumulation_trains_like_one_process(four: RankPool, model: str, zero: int) -> None:
    """Four ranks train with momentum, in two micro-batches per step except for model 'unused'."""
    layout = Layout(dp=4, zero=zero, micro_batch=1, global_batch=BATCH)
    if model == "unused":  # only odd passes use its second layer: one process must have as many passes
        layout = Layout(dp=4, zero=zero, micro_batch=2, global_batch=BATCH)
    assert_trained_like_one(four.run(train_stock, model, "sgd", layout), model, "sgd")


@STAGES
def test_one_process_needs_no_process_group(zero: int) -> None:
    assert_trained_like_one(
        [train_stock("tied", "adamw", Layout(zero=zero, micro_batch=BATCH))], "tied", "adamw"
    )


def fp64_module() -> nn.Module:
    return Plain().double()


@STAGES
def test_fp64_module_trains_like_one_process(two: RankPool, zero: int) -> None:
    """Parameters, gradient norms and optimizer states stay in fp64."""
    assert_script_trains_like_one(two, clipped, layout_of(zero), fp64_module, rtol=1e-13, atol=1e-13)


def train_bf16(zero: int) -> tuple[Tensor, dict[str, torch.dtype], list[float], dict[str, Tensor]]:
    """Train `Stateful` in bf16; return the first output, dtypes, losses and final parameters."""
    torch.manual_seed(1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout(dp=world, zero=zero, precision="bf16", bucket_bytes=300)
    module, optimizer = parallelize_sgd(Stateful(), layout)
    outputs, losses = [], []
    for _ in range(6):
        outputs.append(module(BF16_ROWS))
        loss = (outputs[-1] - BF16_ROWS).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dtypes = {name: t.dtype for name, t in [*module.named_parameters(), *module.named_buffers()]}
    return outputs[0].detach(), dtypes, losses, module.repro.full_parameters()


BF16_ROWS = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()


@STAGES
def test_bf16_module_trains_like_stock_module_in_bf16(two: RankPool, zero: int) -> None:
    torch.manual_seed(1)
    stock = Stateful().to(torch.bfloat16)
    _, _, reference, parameters = train_bf16(0)
    for first, dtypes, losses, mine in two.run(train_bf16, zero):
        torch.testing.assert_close(first, stock(BF16_ROWS).detach(), rtol=0.0, atol=0.0)
        assert dtypes == {name: t.dtype for name, t in [*stock.named_parameters(), *stock.named_buffers()]}
        assert losses == pytest.approx(reference, rel=1e-2)
        assert losses[-1] < losses[0]
        assert_same([mine], parameters, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dp": 2}, r"dp = 2: must be the number of processes, 1"),
        ({"tp": 2}, "tp = 2"),
        ({"pp": 2}, "pp = 2"),
        ({"recompute": True}, r"recompute = true: must be false: a stock module calls"),
        ({"precision": "fp16"}, "fp16"),
        (
            {"precision": "bf16", "grad_dtype": "fp32"},
            r"grad_dtype = 'fp32': must be precision: a stock optimizer",
        ),
    ],
)
def test_unsupported_layouts_are_refused(keys: dict[str, Any], message: str) -> None:
    module = Tied()
    with pytest.raises(ConfigError, match=message):
        repro.parallelize(module, optimizer_of(module, "adamw"), Layout(**keys))


def test_unknown_blocks_parameters_without_group_and_fp64_masters_are_refused() -> None:
    module = Tied()
    with pytest.raises(ValueError, match=r"blocks: 'layer'"):
        repro.parallelize(module, optimizer_of(module, "adamw"), Layout(zero=3), blocks=["layer"])
    partial = torch.optim.SGD(module.layers.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"embed\.weight requires a gradient and is in no parameter group"):
        repro.parallelize(module, partial, Layout())
    with pytest.raises(ValueError, match=r"is float64, .* Call module\.float\(\)"):
        parallelize_sgd(fp64_module(), Layout(precision="bf16"))
