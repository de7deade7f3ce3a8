"""`state_dict` of a wrapped module: what it waits for, and what may be loaded."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import STAGES, WIDTH, Plain, layout_of, message_of, once


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
        whole = {name: value.clone() for name, value in module.state_dict().items()}
    return whole, inner, module.repro.full_parameters()


@pytest.mark.parametrize("zero", range(3))
def test_state_dict_waits_for_the_step(two: RankPool, zero: int) -> None:
    for whole, inner, expected in two.run(states_after_step, zero):
        assert whole.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(whole[name], value), name
        assert {f"blocks.1.{name}" for name in inner} < expected.keys()
        for name, value in inner.items():
            assert torch.equal(value, expected[f"blocks.1.{name}"]), name


def test_stage_3_has_no_state_dict(two: RankPool) -> None:
    for message in two.run(message_of, states_after_step, 3):
        assert message.startswith("state_dict(): under zero = 3")
        assert "module.repro.full_parameters()" in message


@STAGES
def test_states_are_loaded_before(zero: int) -> None:
    """Afterwards they would miss what the optimizer updates; where parameters are that, they may be loaded."""
    for precision in ("fp32", "bf16"):
        states = Plain().state_dict()
        module: nn.Module = Plain()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        module, optimizer = repro.parallelize(module, optimizer, Layout(zero=zero, precision=precision))
        if zero == 3 or precision == "bf16":
            with pytest.raises(RuntimeError, match=r"load before repro\.parallelize"):
                module.load_state_dict(states)
            continue
        module.load_state_dict(states)
        once(module, torch.zeros(1, WIDTH)).backward()
        optimizer.step()
        found = module.repro.full_parameters()
        assert torch.equal(found["blocks.0.0.weight"], states["blocks.0.0.weight"])
