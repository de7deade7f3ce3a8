"""Tests of modules, optimizers and uses that `repro.parallelize` refuses with a remedy."""

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
from tests.pool import RankPool
from tests.wrap.edge_models import STAGES, WIDTH, Plain, error_of, layout_of, loss_fn, parallelize_sgd


def sgd(module: nn.Module) -> torch.optim.Optimizer:
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


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "complex": (complex_module, sgd, "phase is complex"),
    "max_norm": (with_embedding(max_norm=1.0), sgd, "0 has max_norm, which is not supported"),
    "sparse": (with_embedding(sparse=True), sgd, "sparse=False"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(WIDTH)), sgd, "Run a forward pass before"),
    "nothing to train": (lambda: Plain().requires_grad_(False), sgd, "no parameter requires a gradient"),
    "unknown parameter": (
        Plain,
        lambda m: torch.optim.SGD([*m.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1),
        r"a parameter \[2, 2\] is not in the module",
    ),
    "Adafactor": (
        Plain,
        lambda m: torch.optim.Adafactor(m.parameters()),
        "Adafactor is not supported, because its update",
    ),
    "LBFGS": (
        Plain,
        lambda m: torch.optim.LBFGS(m.parameters()),
        "LBFGS is not supported, because it cannot",
    ),
    "Muon": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)),
        lambda m: torch.optim.Muon(m.parameters()),
        "Muon is not supported, because it cannot .* such as AdamW",
    ),
    "DataParallel": (
        lambda: nn.DataParallel(Plain()),
        sgd,
        r"DataParallel is not supported, .* Pass its \.module",
    ),
    "swapped arguments": (
        lambda: sgd(Plain()),
        lambda o: Plain(),
        r"a SGD is not supported\. Call repro\.parallelize\(module, optimizer",
    ),
    "optimizer wrapper": (
        Plain,
        lambda m: SimpleNamespace(optimizer=sgd(m)),
        "must be a torch.optim.Optimizer",
    ),
    "Lamb": (Plain, lambda m: Custom(m, 0.1, lamb), "Custom is not supported, because its update"),
    "warm-up": (Plain, lambda m: Custom(m, 0.0, lamb), "Custom is not supported, because its update"),
    "normalized": (Plain, lambda m: Custom(m, 0.1, normalized), "depends on other elements"),
}


@pytest.mark.parametrize("name", MODULES)
def test_unsupported_modules_and_optimizers_are_refused(name: str) -> None:
    make, optimizer_of, message = MODULES[name]
    module = make()
    with pytest.raises(ValueError, match=message):
        repro.parallelize(module, optimizer_of(module), Layout(zero=2))


def test_custom_elementwise_optimizer_is_supported() -> None:
    module: nn.Module = Plain()
    before = module.into.weight.detach().clone()
    optimizer: torch.optim.Optimizer = Custom(module, 0.25, lambda given: [p.grad.sign() for p in given])
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
        with pytest.raises(
            ValueError, match=r"parallelized already\. Call repro\.parallelize once, for the outermost"
        ):
            repro.parallelize(full, sgd(full), Layout())


def fsdp_error() -> str:
    """Return the error for a module that FSDP2 shards."""
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(Plain())
    return error_of(repro.parallelize, module, sgd(module), layout_of(3))


def test_fsdp_module_is_refused(two: RankPool) -> None:
    for message in two.run(fsdp_error):
        assert "into.weight is a DTensor, which is not supported" in message


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


@STAGES
def test_parallelizing_a_submodule_again_is_refused(zero: int) -> None:
    module, _ = parallelize_sgd(Plain(), Layout(zero=zero))
    block = module.blocks[0]

    def continue_training() -> None:
        repro.parallelize(block, sgd(block), Layout(zero=zero))
        loss_fn(module, torch.ones(1, WIDTH))

    with pytest.raises(RuntimeError, match=r"casting or moving|values exist only"):
        continue_training()


Change = Callable[[nn.Module, torch.optim.Optimizer], Any]
CHANGES: dict[str, tuple[Change, str]] = {
    "double": (lambda m, o: m.double(), "casting or moving|values exist only"),
    "half a module": (lambda m, o: m.blocks[1].to(torch.bfloat16), "casting or moving|values exist only"),
    "data": (
        lambda m, o: setattr(m.into.weight, "data", torch.zeros(WIDTH, WIDTH)),
        "casting or moving|values exist",
    ),
    "copy": (lambda m, o: copy.deepcopy(m), "Copy the module before"),
    "average": (lambda m, o: torch.optim.swa_utils.AveragedModel(m), "Copy the module before"),
    "save": (lambda m, o: torch.save(m, io.BytesIO()), r"save full_parameters\(\) or module\.state_dict\(\)"),
    "group": (
        lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        "Add the group before",
    ),
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
def test_values_written_to_weights_persist(zero: int, precision: str, write: Callable[[Tensor], Any]) -> None:
    module, optimizer = parallelize_sgd(Plain(), Layout(zero=zero, precision=precision), lr=0.0)
    x = torch.ones(1, WIDTH, dtype=module.into.weight.dtype)
    for _ in range(2):
        write(module.into.weight)
        loss_fn(module, x).backward()
        optimizer.step()
        assert float(module.into.weight.detach().abs().max()) <= 0.011
