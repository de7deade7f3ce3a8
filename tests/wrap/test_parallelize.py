"""Tests of `repro.parallelize`: a stock module under DP and ZeRO 1-3 trains like one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import repro
from repro.config import ConfigError, Layout
from tests.pool import RankPool
from tests.wrap.edge_models import STAGES, assert_same
from tests.wrap.stock_models import BATCH, MODELS, Tied, optimizer_of, train_stock


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


def _clipped_norm(zero: int, clip: float) -> float:
    """Return the norm of the parameter change of one SGD step of rate 1 with a clipped gradient."""
    torch.manual_seed(0)
    module: nn.Module = Tied()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module, optimizer = repro.parallelize(
        module, optimizer, Layout(dp=2, zero=zero, micro_batch=4), clip=clip
    )
    torch.nn.functional.cross_entropy(module(torch.eye(11)[:4]), torch.arange(4)).backward()
    optimizer.step()
    after = module.repro.full_parameters()
    return torch.stack([(after[n] - before[n]).norm() for n in before]).norm().item()


@STAGES
def test_clipping_limits_the_global_gradient_norm(two: RankPool, zero: int) -> None:
    assert two.run(_clipped_norm, zero, 0.01) == pytest.approx([0.01, 0.01], rel=1e-3)


def test_gradients_below_the_limit_are_not_scaled_up(two: RankPool) -> None:
    free = two.run(_clipped_norm, 1, 0.0)
    assert 0.01 < free[0] < 100
    assert two.run(_clipped_norm, 1, 100.0) == pytest.approx(free)


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


def test_unknown_blocks_and_parameters_without_group_are_refused() -> None:
    module = Tied()
    with pytest.raises(ValueError, match=r"blocks: 'layer'"):
        repro.parallelize(module, optimizer_of(module, "adamw"), Layout(zero=3), blocks=["layer"])
    partial = torch.optim.SGD(module.layers.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"embed\.weight requires a gradient and is in no parameter group"):
        repro.parallelize(module, partial, Layout())
