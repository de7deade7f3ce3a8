"""Tests of modules, optimizers, passes and uses that `repro.parallelize` refuses with a remedy."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import repro
from repro.config import ConfigError, Layout
from repro.parallel import mesh as meshes
from repro.parallel.zero.flat_parameters import Sharding, Tag
from repro.parallel.zero.partition import default_units
from repro.parallel.zero.stages import ShardedModule
from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    WIDTH,
    Plain,
    Stack,
    assert_same,
    error_of,
    layout_of,
    loss_fn,
    parallelize_sgd,
    reference,
    train,
)

Optim = torch.optim.Optimizer


def sgd(module: nn.Module) -> Optim:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Custom(torch.optim.Optimizer):
    """A custom optimizer that adds `-lr * update(parameters)` to the parameters of a group."""

    def __init__(self, module: nn.Module, lr: float, update: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().__init__(module.parameters(), {"lr": lr})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for p, change in zip(given, self.update(given), strict=True):
                p.sub_(group["lr"] * change)


def lamb(parameters: list[Any]) -> list[Tensor]:
    """Return updates that depend on the norms of each parameter and its gradient."""
    return [p.norm() / p.grad.norm() * p.grad for p in parameters]


def normalized(parameters: list[Any]) -> list[Tensor]:
    """Return updates that depend on the gradients of all parameters."""
    return [p.grad / sum(other.grad.abs().sum() for other in parameters) for p in parameters]


def complex_module() -> nn.Module:
    module = Plain()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return module


def with_embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(4, WIDTH, **options), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (complex_module, "phase is complex"),
        (with_embedding(max_norm=1.0), "0 has max_norm, which is not supported"),
        (with_embedding(sparse=True), "sparse=False"),
        (lambda: nn.Sequential(nn.LazyLinear(WIDTH)), "Run a forward pass before"),
        (lambda: Plain().requires_grad_(False), "no parameter requires a gradient"),
        (lambda: nn.DataParallel(Plain()), r"DataParallel is not supported, .* Pass its \.module"),
        (lambda: sgd(Plain()), r"a SGD is not supported\. Call repro\.parallelize\(module, optimizer"),
    ],
)
def test_unsupported_modules_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repro.parallelize(make(), sgd(Plain()), Layout(zero=2))


@pytest.mark.parametrize(
    ("optimizer_of", "message"),
    [
        (lambda m: sgd(nn.ModuleList([m, nn.Linear(2, 2)])), r"a parameter \[2, 2\] is not in the module"),
        (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor is not supported, because its update"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS is not supported, because it cannot"),
        (
            lambda m: torch.optim.Muon(m.parameters()),
            "Muon is not supported, because it cannot .* such as AdamW",
        ),
        (lambda m: SimpleNamespace(optimizer=sgd(m)), "must be a torch.optim.Optimizer"),
        (lambda m: Custom(m, 0.1, lamb), "Custom is not supported, because its update"),
        (lambda m: Custom(m, 0.0, lamb), "Custom is not supported, because its update"),  # warm-up
        (lambda m: Custom(m, 0.1, normalized), "depends on other elements"),
    ],
)
def test_unsupported_optimizers_are_refused(optimizer_of: Callable[[nn.Module], Any], message: str) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    with pytest.raises(ValueError, match=message):
        repro.parallelize(module, optimizer_of(module), Layout(zero=2))


def test_custom_elementwise_optimizer_is_supported() -> None:
    module: nn.Module = Plain()
    before = module.into.weight.detach().clone()
    optimizer: Optim = Custom(module, 0.25, lambda given: [p.grad.sign() for p in given])
    module, optimizer = repro.parallelize(module, optimizer, Layout(zero=2))
    assert torch.equal(module.into.weight, before)  # the trial step leaves the parameters unchanged
    loss_fn(module, torch.ones(1, WIDTH)).backward()
    optimizer.step()
    change = (module.into.weight - before).abs()
    assert torch.allclose(change[change > 0], torch.tensor(0.25))


def test_invalid_arguments_are_refused() -> None:
    module = Plain()
    for clip in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a positive norm, or 0 for no clipping"):
            repro.parallelize(module, sgd(module), Layout(), clip=clip)
    with pytest.raises(ConfigError, match=r"a repro\.Layout, such as"):
        repro.parallelize(module, sgd(module), {"zero": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"keyword arguments, such as Layout\(dp=2, zero=3\)"):
        Layout(2, 3)  # type: ignore[call-arg]
    repro.parallelize(module, sgd(module), Layout())
    for full in (module, nn.Sequential(module)):
        with pytest.raises(ValueError, match=r"already\. Call repro\.parallelize once, for the outermost"):
            repro.parallelize(full, sgd(full), Layout())


class SparseRows(nn.Module):
    """A model whose functional embedding makes a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, WIDTH))
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.into(nn.functional.embedding(x, self.rows, sparse=True))


@STAGES
def test_sparse_gradient_is_refused(zero: int) -> None:
    module, _ = parallelize_sgd(SparseRows(), Layout(zero=zero))
    with pytest.raises(RuntimeError, match=r"sparse gradient of a parameter \[4, 8\].*sparse=False"):
        loss_fn(module, torch.tensor([1, 2])).backward()


def parallelize_block(module: nn.Module, optimizer: Optim) -> None:
    repro.parallelize(module.blocks[0], sgd(module.blocks[0]), Layout(zero=module.repro.sharding.stage))


MOVED = "casting or moving|values exist only"
CHANGES: dict[str, tuple[Callable[[nn.Module, Optim], Any], str]] = {
    "double": (lambda m, o: m.double(), MOVED),
    "half a module": (lambda m, o: m.blocks[1].to(torch.bfloat16), MOVED),
    "data": (lambda m, o: setattr(m.into.weight, "data", torch.zeros(WIDTH, WIDTH)), MOVED),
    "submodule": (parallelize_block, MOVED),
    "copy": (lambda m, o: copy.deepcopy(m), "Copy the module before"),
    "average": (lambda m, o: torch.optim.swa_utils.AveragedModel(m), "Copy the module before"),
    "save": (lambda m, o: torch.save(m, io.BytesIO()), r"save full_parameters\(\) or module\.state_dict\(\)"),
    "group": (lambda m, o: o.add_param_group({"params": [torch.zeros(2)]}), "Add the group before"),
}


@STAGES
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_parallelized_module_are_refused(name: str, zero: int) -> None:
    change, message = CHANGES[name]
    module, optimizer = parallelize_sgd(Plain(), Layout(zero=zero))

    def continue_training() -> None:
        change(module, optimizer)
        loss_fn(module, torch.ones(1, WIDTH, dtype=module.into.weight.dtype)).backward()

    loss_fn(module, torch.ones(1, WIDTH)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        continue_training()


def test_unfreezing_after_parallelize_is_refused() -> None:
    module: nn.Module = Plain()
    module.into.requires_grad_(False)
    module, _ = repro.parallelize(module, sgd(module), Layout(zero=1))
    module.into.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"into\.weight\.requires_grad: unfreezing after"):
        loss_fn(module, torch.ones(1, WIDTH))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize(
    "write", [lambda w: w.data.clamp_(-0.01, 0.01), lambda w: nn.init.constant_(w, 0.01)]
)
def test_values_written_to_weights_are_saved_and_persist(
    zero: int, precision: str, write: Callable[[Tensor], Any]
) -> None:
    module, optimizer = parallelize_sgd(Plain(), Layout(zero=zero, precision=precision), lr=0.0)
    x = torch.ones(1, WIDTH, dtype=module.into.weight.dtype)
    for _ in range(2):
        write(module.into.weight)
        loss_fn(module, x).backward()
        optimizer.step()
        assert float(module.into.weight.detach().abs().max()) <= 0.011
    nn.init.constant_(module.into.weight, 0.5)
    assert (module.repro.full_state_dict()["into.weight"] == 0.5).all()


def assign_gradients(module: nn.Module, optimizer: Optim, x: Tensor) -> None:
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(loss_fn(module, x), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def read_unreduced_gradient(module: nn.Module, optimizer: Optim, x: Tensor) -> None:
    with module.no_sync():
        loss_fn(module, x).backward()
    module.into.weight.grad.abs()


def repeat_backward_of_earlier_forward(module: nn.Module, optimizer: Optim, x: Tensor) -> None:
    earlier = loss_fn(module, x)
    earlier.backward(retain_graph=True)
    loss_fn(module, x)
    earlier.backward()


def train_block(module: nn.Module, optimizer: Optim, x: Tensor) -> None:
    loss_fn(module, x).backward(inputs=list(module.blocks[0].parameters()))


Use = Callable[[nn.Module, Optim, Tensor], Any]
AFTER_BACKWARD: dict[str, Use] = {
    "replace": lambda m, o, x: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
    "read elements": lambda m, o, x: m.into.weight.grad.abs(),
    "clip shards": lambda m, o, x: nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 1.0),
    "closure": lambda m, o, x: o.step(lambda: loss_fn(m, x)),
}
INSTEAD_OF_BACKWARD: dict[str, Use] = {
    "assign": assign_gradients,
    "read unreduced": read_unreduced_gradient,
    "train submodule": lambda m, o, x: m.into(x).sum().backward(),
    "train block": train_block,
    "earlier forward": repeat_backward_of_earlier_forward,
    "gradient of a parameter": lambda m, o, x: torch.autograd.grad(loss_fn(m, x), [m.blocks[0][0].weight]),
    "state dict": lambda m, o, x: m.state_dict(),
    "create graph": lambda m, o, x: loss_fn(m, x).backward(create_graph=True),
}


FREEZE = (
    "grad() for given parameters is not supported under zero = 3. Call loss.backward() without inputs, and freeze all "
    "other parameters"
)


def misuse(name: str, zero: int) -> None:
    module, optimizer = parallelize_sgd(Plain(), layout_of(zero))
    x = torch.ones(1, WIDTH)
    if name in AFTER_BACKWARD:
        loss_fn(module, x).backward()
    (AFTER_BACKWARD | INSTEAD_OF_BACKWARD)[name](module, optimizer, x)
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        ("replace", range(4), "into.weight.grad: replacing or removing a gradient"),
        ("assign", (0, 2), "into.weight.grad: replacing or removing a gradient"),
        ("read unreduced", (0,), "or before the last backward pass of a step"),
        ("read elements", (1, 2, 3), "is not supported under zero = 1 to 3"),
        ("train submodule", (0, 1, 2), "Call the module itself (not one of its methods)"),
        ("train submodule", (3,), "Call module.repro.full_parameters() on all ranks"),
        ("clip shards", range(4), "Use module.parameters()"),
        ("closure", (0, 3), "Call the closure, then"),
        ("train block", (3,), "backward() for given parameters is not supported under zero = 3"),
        ("earlier forward", (3,), "A backward pass through an earlier forward pass"),
        ("gradient of a parameter", (3,), FREEZE),
        ("state dict", (3,), "state_dict() is not supported under zero = 3"),
        ("create graph", range(4), "backward(create_graph=True) is not supported"),
    ],
)
def test_unsupported_passes_and_uses_of_gradients_are_refused(
    two: RankPool, name: str, stages: list[int], message: str
) -> None:
    for zero in stages:
        for found in two.run(error_of, misuse, name, zero):
            assert message in found, zero


class CallsItself(Plain):
    """A model that calls itself, and thus its hooks."""

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


def call_itself() -> None:
    train(CallsItself, layout_of(3))


def parallelize_fsdp_module() -> None:
    from torch.distributed.fsdp import fully_shard

    parallelize_sgd(fully_shard(Plain()), layout_of(3))


def scale_fp16_gradients() -> None:
    module, optimizer = parallelize_sgd(Plain().half(), layout_of(3))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_fn(module, torch.ones(1, WIDTH).half())).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (call_itself, "calls itself in its forward pass is not supported"),
        (parallelize_fsdp_module, "into.weight is a DTensor, which is not supported"),
        (scale_fp16_gradients, "Leave the module in fp32 and use autocast"),
    ],
)
def test_unsupported_modules_are_refused_during_training(
    two: RankPool, call: Callable[[], None], message: str
) -> None:
    for found in two.run(error_of, call):
        assert message in found


class TiedCheckpoints(Stack):
    """A model with a matrix in two reentrant checkpoints, which therefore gets two gradients."""

    def __init__(self) -> None:
        super().__init__(reentrant=True, bias=False)
        self.blocks[3].weight = self.blocks[1].weight


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
    zeros = lambda _: lambda i, a, b: torch.zeros(b - a)
    sharded = ShardedModule(module, default_units(module), sharding, lambda p: Tag(0), zeros)
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
