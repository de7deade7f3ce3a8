"""Benchmark cases: each kernel, torch's operators for the same work, users' usual PyTorch code, and its compilation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import repro.kernels as kernels
from tests.gpu.bench.case import (
    EAGER,
    KERNEL,
    BenchCase,
    Inputs,
    forward_and_backward,
    implementations,
    random_tensor,
    row_inputs,
)


def _swiglu_inputs(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
    shape = (8, max(4, 1024 // shrink), max(8, 8192 // shrink))
    x = random_tensor(device, dtype, *shape[:-1], 2 * shape[-1])
    return {"x": x.requires_grad_(), "grad": random_tensor(device, dtype, *shape)}


def _eager_swiglu(i: Inputs) -> Tensor:
    gate, up = i["x"].chunk(2, -1)
    return F.silu(gate) * up


def _rotary_inputs(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
    """Return inputs of rotary positions on 32 full heads of width 128."""
    x, grad = (random_tensor(device, dtype, 8, max(4, 1024 // shrink), 4096) for _ in range(2))
    return {"x": x.requires_grad_(), "grad": grad}


def _eager_rotary(i: Inputs) -> Tensor:
    x = i["x"].unflatten(-1, (32, 128))
    exponent = torch.arange(0, 128, 2, device=x.device) / 128
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), 10000.0**-exponent)[:, None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


def _dropout(i: Inputs, plain: bool) -> Tensor:
    place = (0.1, 7, 0, i["seq"], 0, True)
    return kernels.bias_dropout_residual(i["x"], i["bias"], i["residual"], *place, plain=plain)


def _softmax_inputs(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
    s = max(8, 1024 // shrink)
    x, grad = (random_tensor(device, dtype, 8, 16, s, s) for _ in range(2))
    return {"x": x.requires_grad_(), "grad": grad}


def _eager_softmax(i: Inputs) -> Tensor:
    s = i["x"].shape[-1]
    future = torch.ones(s, s, dtype=torch.bool, device=i["x"].device).triu(1)
    return (i["x"] * 0.125).masked_fill(future, float("-inf")).softmax(-1)


def _layer() -> Iterator[BenchCase]:
    """Yield the cases of the differentiable functions of a layer."""
    yield from forward_and_backward(
        *("layer norm", 0.8, row_inputs(4096), ("x", "weight", "bias")),
        implementations(
            lambda i, plain: kernels.layer_norm(i["x"], i["weight"], i["bias"], plain=plain),
            lambda i: F.layer_norm(i["x"], i["weight"].shape, i["weight"], i["bias"]),
        ),
    )
    yield from forward_and_backward(
        *("RMS norm", 0.8, row_inputs(4096), ("x", "weight")),
        implementations(
            lambda i, plain: kernels.rms_norm(i["x"], i["weight"], plain=plain),
            lambda i: F.rms_norm(i["x"], i["weight"].shape, i["weight"], 1e-5),
        ),
    )
    yield _bias_gradient()
    yield from forward_and_backward(
        *("bias + GELU", 0.9, row_inputs(16384), ("x", "bias")),
        implementations(
            lambda i, plain: kernels.bias_gelu(i["x"], i["bias"], plain=plain),
            lambda i: F.gelu(i["x"] + i["bias"], approximate="tanh"),
        ),
    )
    yield from forward_and_backward(
        *("SwiGLU", 0.9, _swiglu_inputs, ("x",)),
        implementations(lambda i, plain: kernels.swiglu(i["x"], plain=plain), _eager_swiglu),
    )
    yield from forward_and_backward(
        *("rotary positions", 0.8, _rotary_inputs, ("x",)),
        implementations(lambda i, plain: kernels.rotary(i["x"], 32, 128, 128, plain=plain), _eager_rotary),
    )
    yield from forward_and_backward(
        *("bias + dropout + residual", 0.9, row_inputs(4096), ("x", "bias")),
        implementations(_dropout, lambda i: i["residual"] + F.dropout(i["x"] + i["bias"], 0.1)),
    )
    yield from forward_and_backward(
        *("causal softmax", 0.0, _softmax_inputs, ("x",)),
        {KERNEL: lambda i: kernels.causal_softmax(i["x"], 0.125), EAGER: _eager_softmax},
    )


def _bias_gradient() -> BenchCase:
    def inputs(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
        return {"rows": random_tensor(device, dtype, max(4, 8192 // shrink), max(8, 4096 // shrink))}

    def nbytes(i: Inputs) -> int:
        price = kernels.cost("sum_rows", i["rows"])
        return price.bytes_read + price.bytes_written

    ways = implementations(
        lambda i, plain: kernels.sum_rows(i["rows"], plain=plain), lambda i: i["rows"].sum(0)
    )
    return BenchCase("bias gradient", 0.8, inputs, ways, nbytes)


def _cross_entropy() -> BenchCase:
    def inputs(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
        count, vocab = max(4, 8192 // shrink), max(8, 50257 // shrink)
        logits = random_tensor(device, dtype, count, vocab)
        grad = torch.full((count,), 1 / count, device=device)
        return {"logits": logits, "targets": torch.randint(vocab, (count,), device=device), "grad": grad}

    def ours(i: Inputs, plain: bool) -> None:
        maximum = kernels.cross_entropy_max(i["logits"], plain=plain)
        sums = kernels.cross_entropy_sums(i["logits"], maximum, i["targets"], 0, plain=plain)
        kernels.cross_entropy_backward_(i["logits"], maximum, sums, i["targets"], 0, i["grad"], plain=plain)

    def eager(i: Inputs) -> Any:
        leaf = i["logits"].detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf.float(), i["targets"]), leaf)

    return BenchCase("cross-entropy with its gradient", 0.8, inputs, implementations(ours, eager))


def _adamw() -> BenchCase:
    options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def inputs(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
        n = max(64, 2**26 // shrink**2)
        master, first, second = (random_tensor(device, torch.float32, n) for _ in range(3))
        grad = random_tensor(device, dtype, n)
        copies = [] if dtype == torch.float32 else [master.to(dtype)]
        scalars = {"step": torch.tensor(5.0, device=device), "lr": torch.tensor(1e-4, device=device)}
        return {"states": ([master], [grad], [first], [second.square_()], copies), **scalars}

    def ours(i: Inputs, plain: bool) -> None:
        kernels.adamw_(*i["states"], step=i["step"], lr=i["lr"], **options, plain=plain)

    def stock(i: Inputs, **how: bool) -> None:
        (master,), (grad,), (first,), (second,), copies = i["states"]
        if "optimizer" not in i:
            parameter = torch.nn.Parameter(master)
            i["optimizer"] = torch.optim.AdamW([parameter], 1e-4, (0.9, 0.95), weight_decay=0.1, **how)
            before = i["step"] - 1  # the optimizer advances its own step count
            steps = before if how.get("fused") else before.cpu()
            i["optimizer"].state[parameter] = {"step": steps, "exp_avg": first, "exp_avg_sq": second}
        parameter = i["optimizer"].param_groups[0]["params"][0]
        parameter.grad = grad.float()
        i["optimizer"].step()
        for copy in copies:
            copy.copy_(parameter.detach())

    def written_out(i: Inputs) -> None:
        (master,), (grad,), (first,), (second,), copies = i["states"]
        g = grad.float()
        first.lerp_(g, 0.1)
        second.mul_(0.95).addcmul_(g, g, value=0.05)
        root = (second / (1 - 0.95 ** i["step"])).sqrt() + 1e-8
        master.mul_(1 - i["lr"] * 0.1).sub_(i["lr"] / (1 - 0.9 ** i["step"]) * first / root)
        for copy in copies:
            copy.copy_(master)

    ways = implementations(ours, written_out)
    ways |= {f"torch {how}": partial(stock, **{how: True}) for how in ("fused", "foreach")}
    return BenchCase("AdamW", 0.9, inputs, ways)


def _tensors(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
    sizes = 32 * [max(3, 2**20 // shrink), max(5, 2**19 // shrink + 1)]
    return {"tensors": [random_tensor(device, dtype, size) for size in sizes]}


def _norm() -> BenchCase:
    def eager(i: Inputs) -> Tensor:
        return torch.stack(torch._foreach_norm(i["tensors"], 2, dtype=torch.float32)).square().sum()

    ways = implementations(lambda i, plain: kernels.norm_squared(i["tensors"], plain=plain), eager)
    return BenchCase("norm and overflow", 0.9, _tensors, ways)


def cases() -> list[BenchCase]:
    """Return the cases in the order of the table: optimizer and norm, the parts of a layer, the loss."""
    return [_adamw(), _norm(), *_layer(), _cross_entropy()]
