"""Tests of the states of a wrapped module and its optimizer: stock states, full states and shards of each rank."""

from __future__ import annotations

import operator
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
    Stateful,
    assert_same,
    error_of,
    layout_of,
    loss_fn,
)


def optimizer_of(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "lr": 0.02},
        {"params": [p for p in trained if p.dim() <= 1]},
    ]
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1)
    return torch.optim.AdamW(groups, lr=0.05, eps=1e-4)


def make(
    layout: Layout | None, seed: int = 1, kind: str = "adamw", model: type[nn.Module] = Stateful
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = model()
    optimizer = optimizer_of(kind, module)
    return (module, optimizer) if layout is None else repro.parallelize(module, optimizer, layout)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same rows on every rank, so that batch norm equals that of one process."""
    for step in steps:
        x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss_fn(module, x.to(module.into.weight.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def layout_in(zero: int, precision: str) -> Layout:
    return Layout(dp=RANKS, zero=zero, precision=precision, bucket_bytes=300)


def train_and_save(zero: int, precision: str) -> list[dict[str, Any]]:
    """Return full state, shard and full optimizer state of this rank after two steps, and its full state after four."""
    module, optimizer = make(layout_in(zero, precision))
    train(module, optimizer, range(2))
    saved = [module.repro.full_state_dict(), module.repro.shard_state_dict()]
    saved.append(optimizer.repro.full_state_dict())  # type: ignore[attr-defined]
    train(module, optimizer, range(2, 4))
    return [*saved, module.repro.full_state_dict()]


def load_and_train(zero: int, precision: str, by_shard: bool, states: list[Any]) -> dict[str, Any]:
    """Load this rank's entry of `states` during another training run; return the full state after two more steps."""
    module, optimizer = make(layout_in(zero, precision), seed=2)
    train(module, optimizer, range(5, 7))
    full, shard, of_optimizer, _ = states[dist.get_rank()]
    if by_shard:
        module.repro.load_shard_state_dict(shard)
    else:
        assert not any(module.load_state_dict(full))
    optimizer.load_state_dict(of_optimizer)
    train(module, optimizer, range(2, 4))
    return module.repro.full_state_dict()


@STAGES
def test_full_state_of_an_optimizer_does_not_follow_later_steps(zero: int) -> None:
    module, optimizer = make(Layout(zero=zero))
    train(module, optimizer, range(2))
    saved = optimizer.repro.full_state_dict()["state"]  # type: ignore[attr-defined]
    train(module, optimizer, range(2, 4))
    assert {float(state["step"]) for state in saved.values()} == {2.0}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@STAGES
def test_loaded_states_resume_training_exactly(two: RankPool, zero: int, precision: str) -> None:
    states = two.run(train_and_save, zero, precision)
    *_, expected = states[0]
    for by_shard in (False, True):
        for found in two.run(load_and_train, zero, precision, by_shard, states):
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                is_equal = torch.equal if isinstance(value, Tensor) else operator.eq
                assert is_equal(found[key], value), key


@STAGES
def test_full_state_equals_that_of_the_stock_module(two: RankPool, zero: int) -> None:
    torch.set_num_threads(1)
    module, optimizer = make(None)
    train(module, optimizer, range(2))
    expected = module.state_dict()
    for found, *_ in two.run(train_and_save, zero, "fp32"):
        assert list(found) == list(expected)
        assert found._metadata == expected._metadata  # type: ignore[attr-defined]
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
        Stateful().load_state_dict(found)


def load_errors(zero: int) -> tuple[list[str], list[str], str, str]:
    """Return errors for own and other states of the module and the optimizer, for `assign`, and for a missing key."""
    module, optimizer = make(layout_in(zero, "fp32"))
    train(module, optimizer, range(1))
    shard, own, full = module.repro.shard_state_dict(), optimizer.state_dict(), module.repro.full_state_dict()
    others = (
        {"repro": shard["repro"] | mark} for mark in ({"rank": 1 - dist.get_rank()}, {"zero": 9}, {"dp": 4})
    )
    marks = [{}, *others]
    load_shard = module.repro.load_shard_state_dict
    of_module = [error_of(load_shard, shard | mark) for mark in (*marks, {"shard": {}})]
    of_optimizer = [error_of(optimizer.load_state_dict, own | mark) for mark in marks]
    assign = error_of(partial(module.load_state_dict, assign=True), module.repro.full_state_dict())
    del full["into.bias"]
    missing = error_of(module.load_state_dict, full)
    assert module.load_state_dict(full, strict=False).missing_keys == ["into.bias"]
    train(module, optimizer, range(1))
    return of_module, of_optimizer, assign, missing


@STAGES
def test_states_of_another_rank_or_layout_are_refused(two: RankPool, zero: int) -> None:
    for of_module, of_optimizer, assign, missing in two.run(load_errors, zero):
        for owner, (valid, *errors) in (("module", of_module), ("optimizer", of_optimizer)):
            assert valid == ""
            for message in errors:
                assert f"Save {owner}.repro.full_state_dict(), which any rank and layout can load" in message
        assert 'Missing key(s) in state_dict: "into.bias"' in missing
        assert assign.endswith("Use assign=False.")


def resume(kind: str, layout: Layout, late: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Resume from the states of a stock optimizer, present or (late) loaded; return final parameters and states."""
    module, optimizer = make(None, kind=kind, model=Plain)
    train(module, optimizer, range(3))
    states = optimizer.state_dict()
    if late:
        optimizer = optimizer_of(kind, module)
    module, optimizer = repro.parallelize(module, optimizer, layout)
    if late:
        optimizer.load_state_dict(states)
    train(module, optimizer, range(3, 6))
    return module.repro.full_parameters(), optimizer.repro.full_state_dict()  # type: ignore[attr-defined]


@STAGES
@pytest.mark.parametrize(("kind", "late"), [("adamw", False), ("adamw", True), ("adagrad", False)])
def test_stock_optimizer_states_are_imported_and_exported(
    two: RankPool, kind: str, late: bool, zero: int
) -> None:
    torch.set_num_threads(1)
    module, optimizer = make(None, kind=kind, model=Plain)
    train(module, optimizer, range(6))
    expected = optimizer.state_dict()
    for parameters, states in two.run(resume, kind, layout_of(zero), late):
        assert_same([parameters], dict(module.named_parameters()), atol=1e-5)
        assert states["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(states["state"], expected["state"], rtol=1e-4, atol=1e-5)
