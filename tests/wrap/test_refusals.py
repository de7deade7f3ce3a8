"""Tests of modules and passes that `repro.parallelize` refuses during training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel.zero.flat_parameters import Sharding, Tag
from repro.parallel.zero.partition import default_units
from repro.parallel.zero.stages import ShardedModule
from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Plain,
    assert_same,
    error_of,
    layout_of,
    loss_fn,
    parallelize_sgd,
    reference,
    train,
)


class CallsItself(nn.Module):
    """A model that calls itself, and thus its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self(x, depth - 1) if depth else x


def test_stage_3_refuses_a_module_that_calls_itself(two: RankPool) -> None:
    for message in two.run(error_of, train, CallsItself, layout_of(3)):
        assert "calls itself in its forward pass is not supported" in message


def backward_of_earlier_forward() -> None:
    """Run a second backward pass of a forward pass after a later forward pass."""
    module, _ = parallelize_sgd(Plain(), layout_of(3))
    earlier = loss_fn(module, torch.ones(1, WIDTH))
    earlier.backward(retain_graph=True)
    loss_fn(module, torch.ones(1, WIDTH))
    earlier.backward()


def test_stage_3_refuses_another_backward_of_an_earlier_forward(two: RankPool) -> None:
    for message in two.run(error_of, backward_of_earlier_forward):
        assert message.startswith("A backward pass through an earlier forward pass")


def gradient_of_a_parameter() -> None:
    module, _ = parallelize_sgd(Plain(), layout_of(3))
    torch.autograd.grad(loss_fn(module, torch.ones(1, WIDTH)), [module.blocks[0][0].weight])


def test_stage_3_refuses_gradients_of_given_parameters(two: RankPool) -> None:
    for message in two.run(error_of, gradient_of_a_parameter):
        assert message.startswith("grad() for given parameters is not supported under zero = 3.")
        assert "Call loss.backward() without inputs, and freeze all other parameters" in message


class TiedCheckpoints(nn.Module):
    """A model with a matrix in two reentrant checkpoints, which therefore gets two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.blocks[3].weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=True))
        return x


@pytest.mark.parametrize("pieces", [1, 2])
@STAGES
def test_second_gradient_of_a_matrix_is_added_or_refused(two: RankPool, zero: int, pieces: int) -> None:
    """Stages 0 to 2 add the second gradient before the reduction of its bucket, and refuse it afterwards."""
    found = two.run(error_of, train, TiedCheckpoints, layout_of(zero, pieces))
    assert all(("gradient after the reduction of its bucket" in message) == (zero < 3) for message in found)
    in_time = layout_of(zero, pieces, bucket_bytes=10_000)
    assert_same(two.run(train, TiedCheckpoints, in_time), reference(TiedCheckpoints))


@STAGES
def test_second_backward_pass_of_a_forward_pass_is_refused(zero: int) -> None:
    module, _ = parallelize_sgd(Plain(), Layout(zero=zero, micro_batch=1, global_batch=2))
    loss = loss_fn(module, torch.ones(1, WIDTH))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward pass"):
        loss.backward()


def sink_two_products(stage: int, others: int) -> Tensor:
    """Pass two products for one weight to its gradient sink; return the reduced gradient."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2, 2))
    module.weight.used_once = True
    for i in range(others):
        module.register_parameter(f"other{i}", nn.Parameter(torch.zeros(2)))
    layout = Layout(zero=stage)
    sharding = Sharding.from_layout(layout, meshes.single_rank_mesh().dp, torch.device("cpu"), None)
    sharded = ShardedModule(
        module,
        default_units(module),
        sharding,
        lambda p: Tag(0),
        lambda _: lambda i, a, b: torch.zeros(b - a),
    )
    sharded.begin(0, 1)
    module.weight.gradient_sink(torch.eye(2), torch.eye(2))
    module.weight.gradient_sink(torch.eye(2), 2 * torch.eye(2))
    sharded.finish()
    (bucket,) = sharded.buckets
    slot = next(slot for slot in bucket.plan.slots if slot.index == 0)
    return bucket.gradient_shard[slot.start : slot.stop].view(2, 2)


@STAGES
def test_second_product_in_gradient_sink_is_added_or_refused(zero: int) -> None:
    torch.testing.assert_close(sink_two_products(zero, others=1), 3 * torch.eye(2))
    if zero < 3:  # stage 3 reduces at the scheduled time, after both products
        with pytest.raises(RuntimeError, match="gradient after the reduction of its bucket"):
            sink_two_products(zero, others=0)
