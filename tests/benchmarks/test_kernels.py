"""Benchmark of each kernel and torch's operators for the same work, with the sizes of a small model on a CPU.

Each group is one comparison: `ours` is the operator of `repro.kernels`, `torch` is eager code or torch's fused
operator, and `reference` is the definition. The time includes the backward if the operator has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import repro.kernels as kernels
from repro.kernels import adamw, dropout, gelu, layernorm, norm

pytestmark = pytest.mark.benchmarks

ROWS, WIDTH, VOCABULARY, PARAMETERS = (4, 128), 256, 2048, 2**21


def backward(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Any]:
    leaves = [t.requires_grad_() for t in tensors]
    grad = torch.randn_like(function(*leaves).detach())
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


DROPOUT = (0.1, 7, 0, ROWS[1], 0, True)
ROW_WISE: dict[str, dict[str, Callable[..., Tensor]]] = {
    "layer_norm": {
        "ours": lambda x, w, b: kernels.layer_norm(x, w, b),
        "torch": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        "reference": layernorm.reference,
    },
    "bias_gelu": {
        "ours": lambda x, w, b: kernels.bias_gelu(x, b),
        "torch": lambda x, w, b: F.gelu(x + b, approximate="tanh"),
        "reference": lambda x, w, b: gelu.reference(x, b),
    },
    "bias_dropout_residual": {
        "ours": lambda x, w, b: kernels.bias_dropout_residual(x, b, x, *DROPOUT),
        "torch": lambda x, w, b: x + F.dropout(x + b, 0.1),
        "reference": lambda x, w, b: dropout.reference(x, b, x, *DROPOUT),
    },
    "bias_residual": {
        "ours": lambda x, w, b: kernels.bias_dropout_residual(x, b, x, 0.0, *DROPOUT[1:]),
        "torch": lambda x, w, b: x + (x + b),
    },
}


@pytest.mark.parametrize("size", ["small", "model"])
@pytest.mark.parametrize(("name", "who"), [(n, w) for n, functions in ROW_WISE.items() for w in functions])
def test_forward_and_backward(benchmark: BenchmarkFixture, name: str, who: str, size: str) -> None:
    benchmark.group = f"{name} {size}"
    width = WIDTH * (4 if name == "bias_gelu" else 1)
    shape = (*ROWS, width) if size == "model" else (1, 1, 8)
    x, w, b = tensors(shape, shape[-1:], shape[-1:])
    function = ROW_WISE[name][who]
    used = [x, w, b] if name == "layer_norm" else [x, b]
    benchmark(backward(function if name == "layer_norm" else lambda x, b: function(x, None, b), *used))


def torch_loss(logits: Tensor, targets: Tensor) -> None:
    leaf = logits.detach().requires_grad_()
    torch.autograd.grad(F.cross_entropy(leaf, targets), leaf)


def our_loss(logits: Tensor, targets: Tensor) -> None:
    maximum = kernels.cross_entropy_max(logits)
    sums = kernels.cross_entropy_sums(logits, maximum, targets, 0)
    scale = torch.full_like(maximum, 1 / len(targets))
    kernels.cross_entropy_backward_(logits, maximum, sums, targets, 0, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("who", [our_loss, torch_loss], ids=["ours", "torch"])
def test_cross_entropy(benchmark: BenchmarkFixture, who: Callable[..., None], dtype: torch.dtype) -> None:
    benchmark.group = f"cross_entropy {dtype}"
    logits, targets = torch.randn(512, VOCABULARY).to(dtype), torch.randint(0, VOCABULARY, (512,))
    benchmark(who, logits, targets)


def optimizer_step(who: str, dtype: torch.dtype) -> Callable[[], Any]:
    master, grad, first, second = tensors(*4 * [(PARAMETERS,)])
    second.square_()
    scalars = {"step": torch.tensor(5.0), "lr": torch.tensor(1e-4)}
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    options |= dict.fromkeys(("grad_scale", "found_inf"))
    copies = [] if dtype == torch.float32 else [master.to(dtype)]
    state = ([master], [grad.to(dtype)], [first], [second], copies)
    if who != "torch":
        function = kernels.adamw_ if who == "ours" else adamw.reference
        return lambda: function(*state, **scalars, **options)  # type: ignore[arg-type]
    parameter = torch.nn.Parameter(master)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        parameter.grad = state[1][0].float()
        optimizer.step()
        if copies:
            copies[0].copy_(parameter.detach())

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("who", ["ours", "torch", "reference"])
def test_adamw_step(benchmark: BenchmarkFixture, who: str, dtype: torch.dtype) -> None:
    benchmark.group = f"adamw {dtype}"
    benchmark(optimizer_step(who, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("who", ["ours", "torch", "reference"])
def test_gradient_norm(benchmark: BenchmarkFixture, who: str, dtype: torch.dtype) -> None:
    benchmark.group = f"norm {dtype}"
    chunks = list(torch.randn(PARAMETERS).to(dtype).split(PARAMETERS // 16))
    functions = {
        "ours": kernels.norm_squared,
        "torch": lambda t: torch.stack(torch._foreach_norm(t, 2, dtype=torch.float32)).square().sum(),
        "reference": norm.reference,
    }
    benchmark(functions[who], chunks)


@pytest.mark.parametrize("who", ["ours", "torch"])
def test_normal_random_numbers(benchmark: BenchmarkFixture, who: str) -> None:
    benchmark.group = "normal"
    functions = {"ours": lambda: kernels.normal(0, 2**18, 1, "cpu"), "torch": lambda: torch.randn(2**18)}
    benchmark(functions[who])
