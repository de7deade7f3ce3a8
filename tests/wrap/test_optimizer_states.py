"""Tests of optimizer states: shards of each rank, and states of a stock optimizer as input and output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, WIDTH, Plain, layout_of, loss_fn

STEPS = 3


def optimizer_of(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "lr": 0.02}, {"params": vectors}]
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1)
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    data = torch.randn(2 * STEPS, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    for step in steps:
        x = data[step].flatten(0, 1)
        if hasattr(module, "repro") and dist.is_initialized():
            x = data[step, dist.get_rank()]
        loss_fn(module, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_stock(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module: nn.Module = Plain()
    optimizer = optimizer_of(kind, module)
    train(module, optimizer, range(steps))
    return module, optimizer


def resume(kind: str, layout: Layout, late: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Resume from the states of a stock optimizer, present or (late) loaded; return final parameters and states."""
    module, optimizer = train_stock(kind, STEPS)
    if late:
        states = optimizer.state_dict()
        optimizer = optimizer_of(kind, module)
    module, optimizer = repro.parallelize(module, optimizer, layout)
    if late:
        optimizer.load_state_dict(states)
    train(module, optimizer, range(STEPS, 2 * STEPS))
    return module.repro.full_parameters(), optimizer.repro.full_state_dict()  # type: ignore[attr-defined]


@STAGES
@pytest.mark.parametrize(("kind", "late"), [("adamw", False), ("adamw", True), ("adagrad", False)])
def test_stock_optimizer_states_are_imported_and_exported(
    two: RankPool, kind: str, late: bool, zero: int
) -> None:
    torch.set_num_threads(1)
    module, optimizer = train_stock(kind, 2 * STEPS)
    expected = optimizer.state_dict()
    for parameters, states in two.run(resume, kind, layout_of(zero), late):
        for name, value in module.named_parameters():
            torch.testing.assert_close(parameters[name], value.detach(), rtol=1e-4, atol=1e-5, msg=name)
        assert states["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(states["state"], expected["state"], rtol=1e-4, atol=1e-5)


def load_errors(zero: int) -> list[str]:
    """Return the errors of loading states of this rank, the other rank, another stage and another dp."""
    module: nn.Module = Plain()
    module, optimizer = repro.parallelize(module, optimizer_of("adamw", module), layout_of(zero))
    train(module, optimizer, range(1))
    own = optimizer.state_dict()
    found = []
    for mark in ({}, {"rank": 1 - dist.get_rank()}, {"zero": 9}, {"dp": 4}):
        try:
            optimizer.load_state_dict({**own, "repro": {**own["repro"], **mark}})
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


@STAGES
def test_states_of_another_rank_or_layout_are_refused(two: RankPool, zero: int) -> None:
    for own, *others in two.run(load_errors, zero):
        assert own == ""
        for message in others:
            assert "Save optimizer.repro.full_state_dict(), which any rank and layout can load" in message
