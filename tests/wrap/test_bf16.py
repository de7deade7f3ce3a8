"""Tests of a wrapped module in bf16: each fp32 tensor becomes bf16, and training matches the stock module in bf16."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import STAGES, STEPS, WIDTH, assert_same, parallelize_sgd


class Mixed(nn.Module):
    """A model with trained, frozen and empty parameters and a buffer in fp32, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks[0].requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x) + self.table
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def train_mixed(zero: int) -> tuple[Tensor, dict[str, torch.dtype], list[float], dict[str, Tensor]]:
    """Train `Mixed` in bf16; return the first output, dtypes, losses and final parameters."""
    torch.manual_seed(1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout(dp=world, zero=zero, precision="bf16", bucket_bytes=300)
    module, optimizer = parallelize_sgd(Mixed(), layout)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    outputs, losses = [], []
    for _ in range(STEPS):
        outputs.append(module(x))
        loss = (outputs[-1] - x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dtypes = {name: t.dtype for name, t in [*module.named_parameters(), *module.named_buffers()]}
    return outputs[0].detach(), dtypes, losses, module.repro.full_parameters()


@STAGES
def test_bf16_module_trains_like_stock_module_in_bf16(two: RankPool, zero: int) -> None:
    torch.manual_seed(1)
    stock = Mixed().to(torch.bfloat16)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    _, _, reference, parameters = train_mixed(0)
    for first, dtypes, losses, mine in two.run(train_mixed, zero):
        torch.testing.assert_close(first, stock(x).detach(), rtol=0.0, atol=0.0)
        assert dtypes == {name: t.dtype for name, t in [*stock.named_parameters(), *stock.named_buffers()]}
        assert losses == pytest.approx(reference, rel=1e-2)
        assert losses[-1] < losses[0]
        assert_same([mine], parameters, rtol=2e-2, atol=1e-2)
