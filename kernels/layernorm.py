"""Layer normalisation over the last dimension: y = (x - mean) * rstd * weight + bias, statistics in fp32."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels import column_sums as sums
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, pointer, read_width, source_type
from repro.kernels.library import Cost, Differentiable, Operand, accumulation_dtype, operator

MAX_FORWARD_BLOCKS, MAX_BACKWARD_THREADS = 64, 1024
"""Maximum numbers per multiprocessor in normalisation kernels: thread blocks in forward, and threads in backward, which
registers limit."""


@cache
def program(
    kind: str, weight: str, columns: int, width: int, backward: bool, centred: bool = True
) -> Program:
    """Return the CUDA program of layer norm or RMS norm for rows of `columns` elements.

    A thread reads `width` elements at once. `kind` and `weight`: names of the types of x and of the weight in the CUDA
    sources. `centred`: with mean and bias (layer norm), else without (RMS norm). Rows that exceed the registers of a
    thread block have a program for rows of any length.
    """
    most, threads = (16, 512) if backward else (32, 512 if width == 1 else 1024)
    shape = sums.row_shape(columns, width, most, threads)
    kinds = (("TYPE", kind), ("WEIGHT", weight), ("CENTRED", int(centred)))
    if shape is None:
        kernels = ("forward", "means", "gradients")
        return Program("layernorm_long", (*kinds, ("WIDTH", width)), struct.Struct("@9Pqiif0q"), kernels, 256)
    definitions = (*kinds, ("BACKWARD", int(backward)), ("WIDTH", width), ("ITEMS", shape[1]))
    kernel = "backward" if backward else "forward"
    return Program("layernorm", definitions, struct.Struct("@8Pqif"), (kernel,), shape[0])


def examples() -> list[Program]:
    """Return CUDA programs of layer norm and RMS norm for the row lengths of known models (8e9 to 1e12 parameters)."""
    usual = [
        ("bfloat16", "bfloat16", 4256, 8, True),
        ("half", "float", 3072, 8, True),
        ("float", "float", 8192, 4, True),
        ("bfloat16", "bfloat16", 8192, 8, False),
        ("half", "half", 25600, 8, True),
    ]
    return [
        program(kind, weight, columns, width, backward, centred)
        for kind, weight, columns, width, centred in usual
        for backward in (False, True)
    ]


def launch_layer_norm(
    on: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the layer norm kernel and return y, mean and rstd = 1 / standard deviation."""
    if bias.dtype != weight.dtype:
        raise Unavailable("layer_norm needs weight and bias of one dtype")
    mean = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    y, rstd = _launch_forward(on, x, weight, eps, bias.contiguous(), mean)
    return y, mean, rstd


def launch_rms_norm(on: KernelLauncher, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch the RMS norm kernel and return y and rstd = 1 / root mean square."""
    return _launch_forward(on, x, weight, eps, None, None)


def _launch_forward(
    on: KernelLauncher, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, mean: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    *shape, columns = x.shape
    y = torch.empty_like(x)
    rstd = x.new_empty(*shape, 1, dtype=torch.float32)
    if size := x.numel():
        width = read_width(columns, [x, weight, y] if bias is None else [x, weight, y, bias])
        kind = program(source_type(x), source_type(weight), columns, width, False, bias is not None)
        rows = size // columns
        pointers = (x.data_ptr(), 0, y.data_ptr(), weight.data_ptr(), pointer(bias))
        statistics = (pointer(mean), rstd.data_ptr())
        if kind.source == "layernorm":
            arguments = kind.arguments.pack(*pointers, *statistics, 0, rows, columns, eps)
        else:
            arguments = kind.arguments.pack(*pointers, *statistics, 0, 0, rows, columns, 0, eps)
        on.load(kind).launch("forward", min(rows, MAX_FORWARD_BLOCKS * on.processors), arguments)
    return y, rstd


def launch_layer_norm_backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernels of layer norm and return the gradients of x, weight and bias."""
    dx, (dweight, dbias) = _launch_backward(on, grad, x, mean.contiguous(), rstd, weight)
    return dx, dweight, dbias


def launch_rms_norm_backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernels of RMS norm and return the gradients of x and weight."""
    dx, (dweight,) = _launch_backward(on, grad, x, None, rstd, weight)
    return dx, dweight


def _launch_backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Launch a normalisation's backward kernels; return the gradients of x, weight and bias (none for RMS norm)."""
    name, vectors = ("rms_norm", 1) if mean is None else ("layer_norm", 2)
    grad, x, weight, rstd = grad.contiguous(), x.contiguous(), weight.contiguous(), rstd.contiguous()
    if grad.dtype != x.dtype or rstd.dtype != torch.float32:
        raise Unavailable(f"{name}_backward needs a gradient of the dtype of x and statistics in fp32")
    dx, columns = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return dx, tuple(torch.zeros_like(weight) for _ in range(vectors))
    width = read_width(columns, [x, weight, grad, dx])
    kind = program(source_type(x), source_type(weight), columns, width, True, mean is not None)
    loaded, rows = on.load(kind), x.numel() // columns
    adding = on.load(sums.program(source_type(weight)))
    pointers = (x.data_ptr(), grad.data_ptr(), dx.data_ptr(), weight.data_ptr(), 0)
    statistics = (pointer(mean), rstd.data_ptr())
    if kind.source == "layernorm":
        blocks = min(rows, max(1, MAX_BACKWARD_THREADS // kind.threads) * on.processors)
        partials = rstd.new_empty(vectors, blocks, columns)
        ends = (*statistics, partials.data_ptr(), rows, columns, 0.0)
        loaded.launch("backward", blocks, kind.arguments.pack(*pointers, *ends))
    else:
        blocks, at_once = sums.row_grid(on, rows, columns, width, kind.threads)
        means, partials = rstd.new_empty(2, rows), rstd.new_empty(vectors, at_once, columns)
        scratch = (means.data_ptr(), partials.data_ptr())
        arguments = kind.arguments.pack(*pointers, *statistics, *scratch, rows, columns, at_once, 0.0)
        loaded.launch("means", min(rows, MAX_FORWARD_BLOCKS * on.processors), arguments)
        loaded.launch("gradients", blocks, arguments)
    found = sums.launch_column_sums(adding, partials, weight.dtype)
    return dx, found.unbind() if vectors > 1 else (found,)


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Compute layer norm with plain torch operators in the dtype of the arguments."""
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd * weight + bias


def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    kind = _weight_dtype(x)
    y, mean, rstd = torch.native_layer_norm(x.contiguous(), weight.shape, weight.to(kind), bias.to(kind), eps)
    return y, mean, rstd


def _weight_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of weight and bias with which torch's layer norm computes mean and variance of x in fp32.

    A GPU accepts only the dtype of x (pytorch/pytorch#135969). A CPU needs fp32 weights, or else rounds the statistics.
    """
    return accumulation_dtype(x.dtype) if x.device.type == "cpu" else x.dtype


def _forward_shape(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    given = weight.to(_weight_dtype(x))
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad.contiguous(), x.contiguous(), weight.shape, mean, rstd, given, given, [True, True, True]
    )
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _backward_shape(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(weight)


forward_operator = operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    _forward,
    _forward_shape,
    launch_layer_norm,
)
backward_operator = operator(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_shape,
    launch_layer_norm_backward,
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, plain: bool = False) -> Tensor:
    """Return layer norm y [..., h] in the dtype of x [..., h]; weight and bias are [h], of one floating dtype.

    Backward saves x, weight, and mean and rstd of every row ([..., 1], fp32; fp64 for fp64 x). `plain`: use torch's
    operators on every device. Raises ValueError if the sizes do not agree.
    """
    if weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        raise ValueError(
            f"layer_norm of {list(x.shape)} needs weight and bias of {list(x.shape[-1:])}, "
            f"not {list(weight.shape)} and {list(bias.shape)}"
        )
    forward, backward = (_forward, _backward) if plain else (forward_operator, backward_operator)
    # Indices of x, mean, rstd and weight in (*inputs, *results) of the forward pass.
    saved = (0, 4, 5, 1)
    return Differentiable.apply(
        lambda x, weight, bias: forward(x, weight, bias, eps),
        lambda grad, *saved: backward(grad, *saved),
        saved,
        x,
        weight,
        bias,
    )


def forward_cost(x: Operand, weight: Operand, bias: Operand, *_: object) -> Cost:
    """Return the cost of layer norm: 8 FLOP per element (mean 1, variance 3, normalise 2, affine 2), and 4 per row."""
    rows = x.numel // max(1, weight.numel)
    return Cost(8 * x.numel + 4 * rows, x.nbytes + weight.nbytes + bias.nbytes, x.nbytes + 2 * 4 * rows)


def backward_cost(grad: Operand, x: Operand, mean: Operand, rstd: Operand, weight: Operand) -> Cost:
    """Return the cost of layer norm's backward pass: 14 FLOP per element.

    They are (x - mean) * rstd 2, grad * weight 1, two row sums of this product 3, dx 4, dweight 2, dbias 1, and the
    product with rstd 1.
    """
    read = grad.nbytes + x.nbytes + mean.nbytes + rstd.nbytes + weight.nbytes
    return Cost(14 * x.numel, read, x.nbytes + 2 * weight.nbytes)
