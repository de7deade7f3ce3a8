"""`state_dict` of a wrapped module: what it waits for; a stock module's and a rank's own, in and out."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import RANKS, ROWS, STAGES, WIDTH, Plain, layout_of, message_of, once


def states_after_step(zero: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """`state_dict()` of the module and of a submodule right after a step, and what it must be."""
    torch.manual_seed(1)
    module: nn.Module = Plain()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module, optimizer = repro.parallelize(module, optimizer, layout_of(zero))
    for _ in range(2):
        once(module, torch.ones(1, WIDTH)).backward()
        if dist.get_rank():
            time.sleep(0.2)  # the others' parameters come late
        optimizer.step()
        inner = {name: value.clone() for name, value in module.blocks[1].state_dict().items()}
        full = {name: value.clone() for name, value in module.state_dict().items()}
    return full, inner, module.repro.full_parameters()


@pytest.mark.parametrize("zero", range(3))
def test_state_dict_waits_for_the_step(two: RankPool, zero: int) -> None:
    for full, inner, expected in two.run(states_after_step, zero):
        assert full.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(full[name], value), name
        assert {f"blocks.1.{name}" for name in inner} < expected.keys()
        for name, value in inner.items():
            assert torch.equal(value, expected[f"blocks.1.{name}"]), name


def test_stage_3_has_no_state_dict(two: RankPool) -> None:
    for message in two.run(message_of, states_after_step, 3):
        assert message.startswith("state_dict() is not supported under zero = 3")
        assert "module.repro.full_state_dict()" in message


class Whole(nn.Module):
    """Blocks, a matrix with two names, what is frozen or empty, buffers of which one is not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.into.weight
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("passing", torch.zeros(()), persistent=False)
        self.steps = 0

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, steps: int) -> None:
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(self.norm(x))


def make(seed: int, layout: Layout | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module: nn.Module = Whole()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=0.05, eps=1e-4
    )
    return (module, optimizer) if layout is None else repro.parallelize(module, optimizer, layout)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """On the same rows on every rank, so that batch norms are those of one process."""
    for step in steps:
        x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        once(module, x.to(module.norm.running_mean.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def layout_in(zero: int, precision: str) -> Layout:
    return Layout(dp=RANKS, zero=zero, precision=precision, bucket_bytes=300)


def saved(zero: int, precision: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """States after two steps: whole, this rank's own, and the optimizer's whole ones."""
    module, optimizer = make(1, layout_in(zero, precision))
    train(module, optimizer, range(2))
    full = optimizer.repro.full_state_dict()  # type: ignore[attr-defined]
    return module.repro.full_state_dict(), module.repro.shard_state_dict(), full


def resumed(zero: int, precision: str, by_shard: bool, states: list[Any]) -> dict[str, Any]:
    """What two more steps make of states that are loaded in the middle of another training; `states` by rank."""
    module, optimizer = make(2, layout_in(zero, precision))
    train(module, optimizer, range(5, 7))
    full, own, of_optimizer = states[dist.get_rank()]
    if by_shard:
        module.repro.load_shard_state_dict(own)
    else:
        assert not any(module.load_state_dict(full))
    optimizer.load_state_dict(of_optimizer)
    train(module, optimizer, range(2, 4))
    return module.repro.full_state_dict()


def unbroken(zero: int, precision: str) -> dict[str, Any]:
    module, optimizer = make(1, layout_in(zero, precision))
    train(module, optimizer, range(4))
    return module.repro.full_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@STAGES
def test_training_goes_on_from_states(two: RankPool, zero: int, precision: str) -> None:
    states = two.run(saved, zero, precision)
    expected = two.run(unbroken, zero, precision)[0]
    for by_shard in (False, True):
        for found in two.run(resumed, zero, precision, by_shard, states):
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value, (
                    key
                )


@STAGES
def test_the_full_states_are_the_stock_modules(two: RankPool, zero: int) -> None:
    torch.set_num_threads(1)
    module, optimizer = make(1, None)
    train(module, optimizer, range(2))
    expected = module.state_dict()
    for found, *_ in two.run(saved, zero, "fp32"):
        assert list(found) == list(expected)
        assert found._metadata == expected._metadata  # type: ignore[attr-defined]
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
        Whole().load_state_dict(found)


def refused(zero: int) -> list[str]:
    """What is said of shards that are another rank's or layout's, of a missing key, and of `assign`."""
    module, _ = make(1, layout_in(zero, "fp32"))
    own, full = module.repro.shard_state_dict(), module.repro.full_state_dict()
    found = [
        message_of(module.repro.load_shard_state_dict, {**own, "repro": {**own["repro"], **mark}})
        for mark in ({}, {"rank": 1 - dist.get_rank()}, {"dp": 4})
    ]
    found.append(message_of(module.repro.load_shard_state_dict, {**own, "shard": {}}))
    found.append(message_of(partial(module.load_state_dict, assign=True), module.repro.full_state_dict()))
    del full["into.bias"]
    found.append(message_of(module.load_state_dict, full))
    assert module.load_state_dict(full, strict=False).missing_keys == ["into.bias"]
    once(module, torch.ones(2, WIDTH)).backward()
    return found


@STAGES
def test_other_states_are_refused(two: RankPool, zero: int) -> None:
    for own, rank, dp, nothing, assign, missing in two.run(refused, zero):
        assert own == ""
        for message in (rank, dp, nothing):
            assert "Save module.repro.full_state_dict(), which any rank and layout can load" in message
        assert 'Missing key(s) in state_dict: "into.bias"' in missing
        assert assign.endswith("Use assign=False.")


@pytest.mark.parametrize("zero", range(3))
def test_what_was_written_to_a_weight_is_saved(zero: int) -> None:
    module: nn.Module = Plain()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = repro.parallelize(module, optimizer, Layout(zero=zero, precision="bf16"))
    nn.init.constant_(module.into.weight, 0.5)
    assert (module.repro.full_state_dict()["into.weight"] == 0.5).all()
