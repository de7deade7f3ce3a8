"""Fused bias and GELU (tanh approximation): y = gelu(x + bias). Backward recomputes x + bias instead of saving it."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels import column_sums as sums
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, read_width, source_type
from repro.kernels.library import Cost, Differentiable, Operand, flatten_rows, like_first, operator


@cache
def program(kind: str, bias: str, width: int) -> Program:
    """Return the CUDA program of bias and GELU for types of x and of the bias; a thread reads `width` elements."""
    definitions = (("TYPE", kind), ("BIAS", bias), ("WIDTH", width))
    return Program("gelu", definitions, struct.Struct("@PPPPPqii"), ("forward", "backward"), 256)


def examples() -> list[Program]:
    """Return example CUDA programs of bias and GELU: for bf16, and for fp16 rows of odd length."""
    return [program("bfloat16", "bfloat16", 8), program("half", "half", 1)]


def launch_bias_gelu(on: KernelLauncher, x: Tensor, bias: Tensor) -> Tensor:
    """Launch the fused kernel of bias and GELU, and return y."""
    x, bias = x.contiguous(), bias.contiguous()
    y, columns = torch.empty_like(x), x.shape[-1]
    if x.numel():
        width = read_width(columns, (x, bias, y))
        kind = program(source_type(x), source_type(bias), width)
        rows = x.numel() // columns
        blocks, at_once = sums.row_grid(on, rows, columns, width, kind.threads)
        arguments = (x.data_ptr(), bias.data_ptr(), 0, y.data_ptr(), 0, rows, columns, at_once)
        on.load(kind).launch("forward", blocks, kind.arguments.pack(*arguments))
    return y


def launch_bias_gelu_backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernels of bias and GELU, and return the gradients of x and of the bias."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    if grad.dtype != x.dtype:
        raise Unavailable("bias_gelu_backward needs a gradient of the dtype of x")
    dx, columns = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return dx, torch.zeros_like(bias)
    width = read_width(columns, (x, bias, grad, dx))
    kind = program(source_type(x), source_type(bias), width)
    loaded, adding = on.load(kind), on.load(sums.program(source_type(bias)))
    rows = x.numel() // columns
    blocks, at_once = sums.row_grid(on, rows, columns, width, kind.threads)
    partials = x.new_empty(1, at_once, columns, dtype=torch.float32)
    pointers = (x.data_ptr(), bias.data_ptr(), grad.data_ptr(), dx.data_ptr(), partials.data_ptr())
    loaded.launch("backward", blocks, kind.arguments.pack(*pointers, rows, columns, at_once))
    return dx, sums.launch_column_sums(adding, partials, bias.dtype)


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """Compute bias and GELU with plain torch operators in the dtype of the arguments."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def _forward(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(torch.add(x.contiguous(), bias.to(x.dtype)), approximate="tanh")


def _backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    u = torch.add(x.contiguous(), bias.to(x.dtype))
    dx = torch.ops.aten.gelu_backward.grad_input(grad.contiguous(), u, approximate="tanh", grad_input=u)
    return dx, flatten_rows(dx).sum(0).to(bias.dtype)


def _backward_shape(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(bias)


forward_operator = operator(
    "bias_gelu(Tensor x, Tensor bias) -> Tensor", _forward, like_first, launch_bias_gelu
)
backward_operator = operator(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor dx, Tensor dbias)",
    _backward,
    _backward_shape,
    launch_bias_gelu_backward,
)


def bias_gelu(x: Tensor, bias: Tensor, *, plain: bool = False) -> Tensor:
    """Return y = GELU(x + bias), [..., f] in the dtype of x; bias is [f]. Only x and bias are saved for backward.

    `plain`: use torch's operators on every device. Raises ValueError if the sizes do not agree.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias_gelu of {list(x.shape)} needs a bias of {list(x.shape[-1:])}, not {list(bias.shape)}"
        )
    forward, backward = (_forward, _backward) if plain else (forward_operator, backward_operator)
    return Differentiable.apply(
        lambda x, bias: forward(x, bias), lambda grad, *saved: backward(grad, *saved), (0, 1), x, bias
    )


def forward_cost(x: Operand, bias: Operand) -> Cost:
    """Return the cost of bias and GELU: 8 FLOP per element (bias, u + 0.044715 u^3 4, scale, sigmoid, product)."""
    return Cost(8 * x.numel, x.nbytes + bias.nbytes, x.nbytes)


def backward_cost(grad: Operand, x: Operand, bias: Operand) -> Cost:
    """Return the cost of GELU's backward pass: 17 FLOP per element (sigmoid and argument 7, slope 8, dx 1, dbias 1)."""
    return Cost(17 * x.numel, grad.nbytes + x.nbytes + bias.nbytes, x.nbytes + bias.nbytes)
