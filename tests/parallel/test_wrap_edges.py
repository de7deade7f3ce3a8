"""repro.parallelize where modules, passes and ranks are unusual: it trains as one process does, or says why not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import repro
from repro.config import Layout
from repro.engines.wrap import require_backend
from repro.parallel import mesh as meshes
from repro.parallel.bucket import Bucket, Tag
from repro.parallel.comm import Work
from repro.parallel.sharding import ShardedModule, Sharding
from repro.parallel.units import default_units
from tests.pool import RankPool, forks

WIDTH, ROWS, STEPS, RANKS = 8, 4, 6, 2


class Scaled(nn.Module):
    """What data decide is which of its parameters a block uses, and in which order."""

    def __init__(self, passes: bool) -> None:
        super().__init__()
        self.passes = passes
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, positive: bool) -> Tensor:
        if positive and self.passes:
            return x  # its own parameters get no gradient, and its output is another module's
        x = torch.tanh(self.second(self.first(x)) if positive else self.first(self.second(x)))
        return x * self.scale if positive else x


class DataDependent(nn.Module):
    """Ranks use the same modules and different parameters; one block is used twice, or cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Scaled(passes=i == 1) for i in range(4))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x.sum() > 0)
        x = torch.tanh(self.into(x))
        for block in self.blocks:
            x = x + block(x, positive)
        y = self.blocks[0](x, not positive)
        if positive:
            y = y.detach()  # nothing behind the second use of block 0 has a gradient here
        return x + y + (self.bias if positive else 0.0)


class Reentrant(nn.Module):
    """One block is used twice under a reentrant checkpoint, one under a checkpoint and without, one once."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        again = partial(checkpoint, use_reentrant=True)
        a, b, c = self.blocks
        x = self.into(x)
        x = x + again(a, x)
        x = again(b, x) + again(c, x)
        x = x + again(c, again(a, x))
        return self.out(b(x))


class Segments(nn.Module):
    """Two blocks a checkpoint, in keyword arguments too; ``use_reentrant`` of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for i in (0, 2, 4):

            def two(x: Tensor, i: int = i) -> Tensor:
                return torch.tanh(self.blocks[i + 1](input=torch.tanh(self.blocks[i](x))))

            x = x + checkpoint(two, x, use_reentrant=i != 2)
        return x


class Containers(nn.Module):
    """Blocks inside dictionaries and lists of lists; parameters in containers, and in a holder of modules."""

    def __init__(self) -> None:
        super().__init__()

        def linear() -> nn.Module:
            return nn.Linear(WIDTH, WIDTH)

        self.dictionaries = nn.ModuleList(nn.ModuleDict({"up": linear(), "down": linear()}) for _ in range(2))
        self.nested = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(2))
        self.scales = nn.ModuleList([nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])])
        self.biases = nn.ModuleList([nn.ParameterDict({"b": torch.zeros(WIDTH)})])
        holder = nn.Module()
        holder.inner = linear()
        holder.own = nn.Parameter(torch.ones(WIDTH))
        self.holders = nn.ModuleList([holder])

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.dictionaries:
            x = x + pair["down"](torch.tanh(pair["up"](x)))
        for group in self.nested:
            for layer in group:
                x = torch.tanh(layer(x))
        (scales,), (biases,), (holder,) = self.scales, self.biases, self.holders
        return holder.inner(x * scales[0] * scales[1]) * holder.own + biases["b"]


class Plain(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class SideDoor(nn.Module):
    """A block's parameter is read without calling the block, as a method does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.blocks[1].weight, self.blocks[1].bias))
        return self.blocks[2](torch.tanh(self.blocks[0](x)))


Pass = Callable[[nn.Module, Tensor], Tensor]


def once(module: nn.Module, x: Tensor) -> Tensor:
    """The loss of one forward pass."""
    return module(x).square().mean()


def evaluate_between(module: nn.Module, x: Tensor) -> Tensor:
    """Evaluation before a forward pass, and between it and its backward pass."""
    with torch.no_grad():
        before = once(module, x)
    loss = once(module, x)
    with torch.no_grad():
        assert torch.equal(module(x).square().mean(), before)
        module(-x)
    return loss


def checkpointed(reentrant: bool, module: nn.Module, x: Tensor) -> Tensor:
    """The whole module is computed again in the backward pass."""
    return checkpoint(module, x.requires_grad_(), use_reentrant=reentrant).square().mean()


def two_passes(module: nn.Module, x: Tensor) -> Tensor:
    """One loss of two forward passes."""
    return once(module, x) + once(module, -x)


def after_failure(module: nn.Module, x: Tensor) -> Tensor:
    """A backward pass broke off before this one."""
    out = module(x)
    out.grad_fn.register_prehook(fail)
    with pytest.raises(ZeroDivisionError):
        out.square().mean().backward()
    return once(module, x)


def fail(gradients: Any) -> None:
    """A hook of the user's."""
    raise ZeroDivisionError


def abandoned(module: nn.Module, x: Tensor) -> Tensor:
    """A forward pass that records gradients and has no backward pass."""
    once(module, -x)
    return once(module, x)


def train(
    kind: type[nn.Module], layout: Layout | None, loss_of: Pass = once, late: bool = False
) -> dict[str, Tensor]:
    """Parameters after some steps; without a layout of one process that has all ranks' samples, rank by rank.

    ``late``: rank 1 sends its new parameters late.
    """
    torch.manual_seed(1)
    module = kind()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    mine = list(range(RANKS))
    pieces = 1
    if layout is not None:
        module, optimizer = repro.parallelize(module, optimizer, layout)
        mine, pieces = [dist.get_rank()], layout.accumulation
        if late and dist.get_rank():
            for bucket in module.repro.buckets:
                vars(bucket)["gather"] = partial(gather_late, bucket)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        inputs = torch.randn(RANKS, ROWS, WIDTH, generator=data)
        for piece in range(pieces):
            share = [inputs[r].chunk(pieces)[piece] for r in mine]
            (sum(loss_of(module, x) for x in share) / len(mine) / pieces).backward()  # type: ignore[union-attr]
        if layout is None:
            for parameter in module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    if layout is None:
        return {name: p.detach().clone() for name, p in module.named_parameters()}
    return module.repro.full_parameters()


def gather_late(bucket: Bucket) -> Work:
    """The other ranks wait a while for this rank's part of every bucket."""
    time.sleep(0.02)
    return Bucket.gather(bucket)


@cache
def alone(kind: type[nn.Module], loss_of: Pass = once) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train(kind, None, loss_of)


def assert_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for mine in found:
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6, msg=name)


def layout_of(zero: int, pieces: int = 1, bucket_bytes: int = 300) -> Layout:
    """Buckets that hold one linear layer, so that each is reduced by itself."""
    rows = ROWS // pieces
    return Layout(dp=RANKS, zero=zero, micro_batch=rows, global_batch=RANKS * ROWS, bucket_bytes=bucket_bytes)


STAGES = pytest.mark.parametrize("zero", range(4))


@STAGES
@pytest.mark.parametrize("kind", [DataDependent, Reentrant, Segments, Containers])
def test_trains_as_one_process_does(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero)), alone(kind))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("kind", [Containers, SideDoor])
def test_no_stale_parameter_is_read(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero), once, True), alone(kind))


@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_module_under_a_checkpoint(two: RankPool, reentrant: bool, zero: int) -> None:
    found = two.run(train, Plain, layout_of(zero), partial(checkpointed, reentrant))
    assert_same(found, alone(Plain))


@STAGES
def test_training_goes_on_after_a_backward_pass_that_failed(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero), after_failure), alone(Plain))


@STAGES
@pytest.mark.parametrize("kind", [Reentrant, Segments])
def test_reentrant_checkpoints_and_accumulation(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero, 2)), alone(kind))


@STAGES
def test_evaluation_between_forward_and_backward(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero), evaluate_between), alone(Plain))


@STAGES
@pytest.mark.parametrize("kind", [Plain, Reentrant])
def test_a_forward_pass_without_a_backward_pass(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero), abandoned), alone(kind))


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize("kind", [Plain, Reentrant])
def test_one_loss_of_two_forward_passes(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    found = two.run(train, kind, layout_of(zero), two_passes)
    assert_same(found, alone(kind, two_passes))


# -- what is refused -------------------------------------------------------------------------------


def message_of(call: Callable[..., Any], *arguments: Any) -> str:
    """What a call raises, on this rank."""
    try:
        call(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [Plain, Reentrant])
def test_stage_3_refuses_one_loss_of_two_forward_passes(two: RankPool, kind: type[nn.Module]) -> None:
    for message in two.run(message_of, train, kind, layout_of(3), two_passes):
        assert "needs its own backward pass before the next one" in message


class TiedCheckpoints(nn.Module):
    """Two modules that reentrant checkpoints run share a matrix, which therefore gets two gradients."""

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
def test_a_late_gradient_is_added_or_refused(two: RankPool, zero: int, pieces: int) -> None:
    """Stages 0 to 2 cannot know that the matrix gets a second gradient: it comes in time, or it is an error."""
    found = two.run(message_of, train, TiedCheckpoints, layout_of(zero, pieces))
    assert all(("a gradient came after its bucket" in message) == (zero < 3) for message in found)
    in_time = layout_of(zero, pieces, bucket_bytes=10_000)
    assert_same(two.run(train, TiedCheckpoints, in_time), alone(TiedCheckpoints))


@STAGES
def test_a_second_backward_pass_of_one_forward_pass_is_an_error(zero: int) -> None:
    module, optimizer = Plain(), None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = repro.parallelize(module, optimizer, Layout(zero=zero, micro_batch=1, global_batch=2))
    loss = once(module, torch.ones(1, WIDTH))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward pass"):
        loss.backward()


def sink_twice(stage: int, others: int) -> Tensor:
    """Two products for one weight in one pass; returns its reduced gradient."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2, 2))
    module.weight.used_once = True
    for i in range(others):
        module.register_parameter(f"other{i}", nn.Parameter(torch.zeros(2)))
    layout = Layout(zero=stage)
    sharding = Sharding.of(layout, meshes.single().dp, torch.device("cpu"), None)
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
def test_a_second_product_in_the_sink_is_added_or_refused(zero: int) -> None:
    torch.testing.assert_close(sink_twice(zero, others=1), 3 * torch.eye(2))
    if zero < 3:  # stage 3 waits for the schedule
        with pytest.raises(RuntimeError, match="a gradient came after its bucket"):
            sink_twice(zero, others=0)


# -- blocks ----------------------------------------------------------------------------------------


def test_blocks_are_the_nearest_modules_with_a_forward() -> None:
    names = [unit.name for unit in default_units(Containers())]
    assert names == [
        *(f"dictionaries.{i}.{key}" for i in range(2) for key in ("up", "down")),
        *(f"nested.{i}.{k}" for i in range(2) for k in range(2)),
        "holders.0.inner",
        "",
    ]


def test_a_block_under_two_names_is_one_unit() -> None:
    module = nn.Module()
    shared = nn.Linear(2, 2)
    module.encoder = nn.ModuleList([shared, nn.Linear(2, 2)])
    module.decoder = nn.ModuleList([shared, nn.ModuleList([nn.Linear(2, 2), shared])])
    assert [unit.name for unit in default_units(module)] == ["encoder.0", "encoder.1", "decoder.1.0", ""]


@pytest.mark.parametrize("name", ["dictionaries", "dictionaries.0", "nested.1", "holders.0", "scales.0"])
def test_a_container_is_no_block(name: str) -> None:
    with pytest.raises(ValueError, match=rf"blocks: '{name}': \w+ has no forward of its own"):
        default_units(Containers(), [name])


# -- state_dict ------------------------------------------------------------------------------------


def states_after_step(zero: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """``state_dict()`` of the module and of a submodule right after a step, and what it must be."""
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


# -- bf16 ------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Frozen parameters, an empty one and buffers, all fp32 but a counter."""

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
    """First output, data types, losses and parameters in bf16."""
    torch.manual_seed(1)
    module: nn.Module = Mixed()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=0.1
    )
    layout = Layout(
        dp=dist.get_world_size() if dist.is_initialized() else 1,
        zero=zero,
        precision="bf16",
        bucket_bytes=300,
    )
    module, optimizer = repro.parallelize(module, optimizer, layout)
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
def test_bf16_is_the_module_in_bf16(two: RankPool, zero: int) -> None:
    torch.manual_seed(1)
    stock = Mixed().to(torch.bfloat16)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    _, _, reference, parameters = train_mixed(0)
    for first, dtypes, losses, mine in two.run(train_mixed, zero):
        torch.testing.assert_close(first, stock(x).detach(), rtol=0.0, atol=0.0)
        assert dtypes == {name: t.dtype for name, t in [*stock.named_parameters(), *stock.named_buffers()]}
        assert losses == pytest.approx(reference, rel=1e-2)
        assert losses[-1] < losses[0]
        for name, value in parameters.items():
            torch.testing.assert_close(mine[name], value, rtol=2e-2, atol=1e-2, msg=name)


# -- overlap under stage 3 -------------------------------------------------------------------------


class Stack(nn.Module):
    """An embedding and blocks, checkpointed or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = torch.tanh(block(x))
            else:
                x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return x


def order_of_backward(reentrant: bool | None) -> list[str]:
    """Collectives of the second step's backward pass, and when each block's gradient comes."""
    module: nn.Module = Stack(reentrant)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = repro.parallelize(module, optimizer, layout_of(3))
    seen: list[str] = []
    for i, block in enumerate(module.blocks):
        block.weight.register_post_accumulate_grad_hook(lambda p, i=i: seen.append(f"block {i}"))
    module.into.weight.register_post_accumulate_grad_hook(lambda p: seen.append("into"))
    group = module.repro.sharding.group
    group.ledger.observers.append(lambda sequence, op, name, purpose: seen.append(purpose))
    for _ in range(2):
        loss = once(module, torch.ones(1, WIDTH))
        seen.clear()
        loss.backward()
        found = list(seen)
        optimizer.step()
    return found


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_stage_3_reduces_and_gathers_while_the_backward_pass_runs(
    two: RankPool, reentrant: bool | None
) -> None:
    """As soon as a block has its gradients they are reduced, and what comes after the next is gathered."""
    last = ["parameters"] if reentrant else []  # under no_grad the last block cannot know that it stays
    for found in two.run(order_of_backward, reentrant):
        assert [what for what in found if what != "block 3"][: len(last)] == last
        assert found[len(last) :] == [
            "parameters",
            "block 3",
            *("gradients", "parameters", "block 2"),
            *("gradients", "parameters", "block 1"),
            *("gradients", "block 0"),
            *("gradients", "into"),
            "gradients",
        ]


# -- the process group -----------------------------------------------------------------------------


def train_on_the_cpu(group: str, port: int, rank: int) -> None:
    """A step of a rank that a launcher has started, on a machine with GPUs of which its module uses none."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank))
    torch.cuda.is_available = lambda: True
    if group == "group":
        dist.init_process_group("cpu:gloo")
    module = nn.Linear(2, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = repro.parallelize(module, optimizer, Layout(dp=2, zero=3))
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.cuda.is_initialized()
    dist.destroy_process_group()


@pytest.mark.parametrize("group", ["group", "none"])
def test_a_module_on_the_cpu_uses_gloo(group: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    context = forks()
    ranks = [context.Process(target=train_on_the_cpu, args=(group, port, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def test_the_process_group_serves_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    require_backend("cpu:gloo,cuda:nccl", cpu)
    require_backend("cpu:gloo,cuda:nccl", cuda)
    require_backend("cuda:nccl", cuda)
    with pytest.raises(ValueError, match="lacks cuda:nccl for a module on cuda"):
        require_backend("cpu:gloo,cuda:gloo", cuda)
    with pytest.raises(ValueError, match="lacks cpu:gloo for a module on cpu"):
        require_backend("cuda:nccl", cpu)
    with pytest.raises(ValueError, match="module: on meta"):
        require_backend("cpu:gloo", torch.device("meta"))
