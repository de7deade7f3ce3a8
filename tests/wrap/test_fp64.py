"""Tests of a module in fp64: parameters, gradient norms and optimizer states stay in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, STEPS, WIDTH, Plain, assert_same, layout_of, loss_fn

TOLERANCE = 1e-13


def train(layout: Layout | None) -> tuple[list[float], dict[str, Tensor]]:
    """Train in fp64; return the gradient norms and the final parameters."""
    torch.manual_seed(1)
    module: nn.Module = Plain().double()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    mine = list(range(RANKS))
    if layout is not None:
        module, optimizer = repro.parallelize(module, optimizer, layout)
        mine = [dist.get_rank()]
    data = torch.Generator().manual_seed(7)
    norms = []
    for _ in range(STEPS):
        x = torch.randn(RANKS, ROWS, WIDTH, generator=data, dtype=torch.float64)
        loss_fn(module, x[mine].flatten(0, 1)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    if layout is None:
        return norms, {name: p.detach() for name, p in module.named_parameters()}
    return norms, module.repro.full_parameters()


@STAGES
def test_fp64_module_trains_like_one_process(two: RankPool, zero: int) -> None:
    torch.set_num_threads(1)
    norms, expected = train(None)
    for mine, parameters in two.run(train, layout_of(zero)):
        assert mine == pytest.approx(norms, rel=TOLERANCE)
        assert_same([parameters], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_bf16_precision_refuses_fp64_parameters() -> None:
    module = Plain().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"is float64, .* Call module\.float\(\)"):
        repro.parallelize(module, optimizer, Layout(precision="bf16"))
