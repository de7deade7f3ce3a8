"""Fused scale, causal mask and softmax of attention scores, like Megatron-LM's `scaled_upper_triang_masked_softmax`.

Without CUDA, torch's operators process chunks of the scores. Rows are computed in fp32 and rounded once.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.column_sums import row_shape
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, pointer, read_width, source_type
from repro.kernels.library import (
    Cost,
    Differentiable,
    Operand,
    accumulation_dtype,
    like_first,
    operator,
    row_chunks,
)

MAX_BLOCKS_PER_PROCESSOR = 64
"""Maximum number of thread blocks per multiprocessor in the causal softmax kernels."""


@cache
def program(kind: str, size: int, width: int, backward: bool) -> Program:
    """Return the CUDA program of causal softmax for rows of `size` scores; a thread reads `width` scores at once."""
    most, threads = (16, 1024) if backward else (32, 1024)
    shape = row_shape(size, width, most, threads)
    if shape is None:
        name = "causal_softmax_backward" if backward else "causal_softmax"
        raise Unavailable(f"{name} supports rows of up to {most * threads} scores, not {size}")
    definitions = (("TYPE", kind), ("BACKWARD", int(backward)), ("WIDTH", width), ("ITEMS", shape[1]))
    kernel = "backward" if backward else "forward"
    return Program("softmax", definitions, struct.Struct("@PPPqif"), (kernel,), shape[0])


def examples() -> list[Program]:
    """Return example CUDA programs of causal softmax: for sequences of 1024 tokens, and of an odd length."""
    usual = [("half", 1024, 8), ("float", 2047, 1)]
    return [program(*rows, backward) for rows in usual for backward in (False, True)]


def launch_causal_softmax(on: KernelLauncher, scores: Tensor, scale: float) -> Tensor:
    """Launch the causal softmax kernel and return the attention weights."""
    return _launch(on, "forward", scores.contiguous(), None, scale)


def launch_causal_softmax_backward(on: KernelLauncher, grad: Tensor, y: Tensor, scale: float) -> Tensor:
    """Launch the backward kernel of causal softmax and return the gradient of the scores."""
    if grad.dtype != y.dtype:
        raise Unavailable("causal_softmax_backward needs a gradient with the dtype of the attention weights")
    return _launch(on, "backward", y.contiguous(), grad.contiguous(), scale)


def _launch(on: KernelLauncher, kernel: str, x: Tensor, grad: Tensor | None, scale: float) -> Tensor:
    out, size = torch.empty_like(x), x.shape[-1]
    if x.numel():
        width = read_width(size, [x, out] if grad is None else [x, out, grad])
        kind = program(source_type(x), size, width, grad is not None)
        pointers = (x.data_ptr(), pointer(grad), out.data_ptr())
        rows = x.numel() // size
        arguments = kind.arguments.pack(*pointers, rows, size, scale)
        on.load(kind).launch(kernel, min(rows, MAX_BLOCKS_PER_PROCESSOR * on.processors), arguments)
    return out


def _future(scores: Tensor) -> Tensor:
    """Return the causal mask [s, s] (query, key), True where the key's position comes after the query's."""
    s = scores.shape[-1]
    return torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)


def reference(scores: Tensor, scale: float) -> Tensor:
    """Compute the causal softmax with plain torch operators in the dtype of the argument."""
    return (scores * scale).masked_fill(_future(scores), float("-inf")).softmax(-1)


def _matrices(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, *x.shape[-2:])


def _forward(scores: Tensor, scale: float) -> Tensor:
    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    s, future, wide = scores.shape[-1], _future(scores), accumulation_dtype(scores.dtype)
    given, out = _matrices(scores), y.view(-1, s, s)
    for first, last in row_chunks(given.shape[0], s * s, scores.device):
        scaled = given[first:last].to(wide, copy=True).mul_(scale).masked_fill_(future, float("-inf"))
        out[first:last].copy_(scaled.softmax(-1))
    return y


def _backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    s, wide = y.shape[-1], accumulation_dtype(y.dtype)
    grads, weights, out = _matrices(grad), _matrices(y), dx.view(-1, s, s)
    for first, last in row_chunks(weights.shape[0], s * s, y.device):
        weight = weights[first:last].to(wide)
        product = grads[first:last].to(wide) * weight
        # The gradient of the scaled scores is y (g - sum(g y)), which is 0 for future keys, whose weight y is 0.
        slope = torch.addcmul(product, weight, product.sum(-1, keepdim=True), value=-1)
        out[first:last].copy_(slope.mul_(scale))
    return dx


def _backward_shape(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    return y.new_empty(y.shape)


forward_operator = operator(
    "causal_softmax(Tensor scores, float scale) -> Tensor", _forward, like_first, launch_causal_softmax
)
backward_operator = operator(
    "causal_softmax_backward(Tensor grad, Tensor y, float scale) -> Tensor",
    _backward,
    _backward_shape,
    launch_causal_softmax_backward,
)


def causal_softmax(scores: Tensor, scale: float, *, plain: bool = False) -> Tensor:
    """Return the causal softmax of scale * scores in the dtype of the scores [..., s, s] (query, key).

    Backward saves only the result. `plain`: use torch's operators on every device. Raises ValueError unless there are
    as many keys as queries.
    """
    if scores.dim() < 2 or scores.shape[-1] != scores.shape[-2]:
        raise ValueError(f"causal_softmax needs scores [..., s, s], not {list(scores.shape)}")
    forward, backward = (_forward, _backward) if plain else (forward_operator, backward_operator)
    return Differentiable.apply(
        lambda scores: forward(scores, scale), lambda grad, y: backward(grad, y, scale), (1,), scores
    )


def forward_cost(scores: Operand, *_: object) -> Cost:
    """Return the cost of causal softmax: 6 FLOP per score, also masked (scale, max, difference, exp, sum, quotient)."""
    return Cost(6 * scores.numel, scores.nbytes, scores.nbytes)


def backward_cost(grad: Operand, y: Operand, *_: object) -> Cost:
    """Return causal softmax's backward cost: 5 FLOP per score, also masked (2 products, sum, difference, scale)."""
    return Cost(5 * y.numel, grad.nbytes + y.nbytes, y.nbytes)
