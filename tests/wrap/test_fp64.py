"""A module in fp64 trains in fp64, gradients' norms and the optimizer's states included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, STEPS, WIDTH, Plain, assert_same, layout_of, once

TINY = 1e-13


def train(layout: Layout | None) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of the gradients, and the parameters in the end."""
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
        once(module, x[mine].flatten(0, 1)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    if layout is None:
        return norms, {name: p.detach() for name, p in module.named_parameters()}
    return norms, module.repro.full_parameters()


@STAGES
def test_fp64_trains_as_it_does_alone(two: RankPool, zero: int) -> None:
    torch.set_num_threads(1)
    norms, expected = train(None)
    for mine, parameters in two.run(train, layout_of(zero)):
        assert mine == pytest.approx(norms, rel=TINY)
        assert_same([parameters], expected, rtol=TINY, atol=TINY)


def test_fp64_is_not_narrowed_to_fp32_master_weights() -> None:
    module = Plain().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"is float64, .* Call module\.float\(\)"):
        repro.parallelize(module, optimizer, Layout(precision="bf16"))
