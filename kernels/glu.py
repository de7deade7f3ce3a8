"""Gated linear unit with SiLU (2002.05202): y = silu(gate) * up, with gate and up as halves of a tensor [..., 2 f]."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, pointer, read_width, source_type
from repro.kernels.library import (
    Cost,
    Differentiable,
    Operand,
    accumulation_dtype,
    flatten_rows,
    operator,
    row_chunks,
)

MAX_BLOCKS_PER_PROCESSOR = 16
"""Maximum number of thread blocks per multiprocessor in the SwiGLU kernels, about twice as many as run at once."""


@cache
def program(kind: str, width: int) -> Program:
    """Return the CUDA program of SwiGLU for tensors of type `kind`; a thread reads `width` elements at once."""
    definitions = (("TYPE", kind), ("WIDTH", width))
    return Program("glu", definitions, struct.Struct("@PPPqi0q"), ("forward", "backward"), 256)


def examples() -> list[Program]:
    """Return example CUDA programs of SwiGLU: for bf16, and for fp16 rows of odd length."""
    return [program("bfloat16", 8), program("half", 1)]


def _launch(on: KernelLauncher, kernel: str, x: Tensor, grad: Tensor | None, into: Tensor) -> Tensor:
    if x.numel():
        columns = x.shape[-1] // 2
        width = read_width(columns, [x, into] if grad is None else [x, into, grad])
        kind, rows = program(source_type(x), width), x.numel() // x.shape[-1]
        blocks = min(-(-rows * columns // width // kind.threads), MAX_BLOCKS_PER_PROCESSOR * on.processors)
        pointers = (x.data_ptr(), pointer(grad), into.data_ptr())
        on.load(kind).launch(kernel, blocks, kind.arguments.pack(*pointers, rows, columns))
    return into


def launch_swiglu(on: KernelLauncher, x: Tensor) -> Tensor:
    """Launch the SwiGLU kernel and return y = silu(gate) * up."""
    x = x.contiguous()
    return _launch(on, "forward", x, None, x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))


def launch_swiglu_backward(on: KernelLauncher, grad: Tensor, x: Tensor) -> Tensor:
    """Launch the backward kernel of SwiGLU and return the gradient of x."""
    if grad.dtype != x.dtype:
        raise Unavailable("swiglu_backward needs a gradient of the dtype of x")
    x = x.contiguous()
    return _launch(on, "backward", x, grad.contiguous(), torch.empty_like(x))


def reference(x: Tensor) -> Tensor:
    """Compute SwiGLU with plain torch operators in the dtype of the argument."""
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def _forward(x: Tensor) -> Tensor:
    y = _forward_shape(x)
    given, out, wide = flatten_rows(x), flatten_rows(y), accumulation_dtype(x.dtype)
    for first, last in row_chunks(given.shape[0], given.shape[1], x.device):
        gate, up = given[first:last].to(wide).chunk(2, -1)
        out[first:last].copy_(torch.sigmoid(gate).mul_(gate).mul_(up))
    return y


def _forward_shape(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _backward(grad: Tensor, x: Tensor) -> Tensor:
    dx = _backward_shape(grad, x)
    grads, given, out, wide = (
        flatten_rows(grad),
        flatten_rows(x),
        flatten_rows(dx),
        accumulation_dtype(x.dtype),
    )
    for first, last in row_chunks(given.shape[0], given.shape[1], x.device):
        slope = grads[first:last].to(wide)
        gate, up = given[first:last].to(wide).chunk(2, -1)
        dgate, dup = out[first:last].chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dup.copy_(slope * silu)
        # silu' = sigmoid + silu (1 - sigmoid)
        dgate.copy_(sigmoid.addcmul(silu, 1 - sigmoid).mul_(up).mul_(slope))
    return dx


def _backward_shape(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


forward_operator = operator("swiglu(Tensor x) -> Tensor", _forward, _forward_shape, launch_swiglu)
backward_operator = operator(
    "swiglu_backward(Tensor grad, Tensor x) -> Tensor", _backward, _backward_shape, launch_swiglu_backward
)


def swiglu(x: Tensor, *, plain: bool = False) -> Tensor:
    """Return SwiGLU, y = silu(gate) * up, [..., f] in the dtype of x [..., 2 f] = (gate, up). Backward saves only x.

    `plain`: use torch's operators on every device. Raises ValueError if the last dimension is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu of {list(x.shape)} needs an even last dimension: gate and up")
    forward, backward = (_forward, _backward) if plain else (forward_operator, backward_operator)
    return Differentiable.apply(lambda x: forward(x), lambda grad, x: backward(grad, x), (0,), x)


def forward_cost(x: Operand) -> Cost:
    """Return SwiGLU's cost: 3 FLOP per element of the result (sigmoid, product with gate, product with up)."""
    return Cost(3 * x.numel // 2, x.nbytes, x.nbytes // 2)


def backward_cost(grad: Operand, x: Operand) -> Cost:
    """Return the cost of SwiGLU's backward pass: 8 FLOP per output element (sigmoid, silu, dup, silu' 3, dgate 2)."""
    return Cost(8 * grad.numel, grad.nbytes + x.nbytes, x.nbytes)
