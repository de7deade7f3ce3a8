"""Tensor parallelism of Megatron-LM (1909.08053 sec. 3) and its sequence parallelism (2205.05198 sec. 4).

Attention and MLP each have a matrix that is split by columns over the tp group, then one that is split by rows. The
only communication is one all-reduce for each in forward and backward. With `sp` (sequence parallelism) an all-gather
and a reduce-scatter along the sequence replace the all-reduce, and activations outside attention and MLP are split.

`parameter.split` is the dimension along which a parameter is split; None: all tp ranks have equal values.
`parameter.partial`: whether a rank computes only a summand of such a parameter's gradient, to be summed over tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from repro import kernels
from repro.parallel import storage
from repro.parallel.comm import MAX, SUM, Group, Work


def gather_sequence(x: Tensor, tp: Group, purpose: str) -> tuple[Tensor, Work]:
    """All-gather x [b, s/t, h] of t ranks along the sequence to [b, s, h], which is valid after the work's `wait`."""
    b, s, h = x.shape
    parts = torch.empty((tp.size, b, s, h), dtype=x.dtype, device=x.device)
    work = tp.all_gather(parts.view(-1), x.contiguous().view(-1), purpose)
    if b == 1:
        return parts.view(1, tp.size * s, h), work
    gathered = torch.empty((b, tp.size, s, h), dtype=x.dtype, device=x.device)

    def finish() -> None:
        work.wait()
        gathered.copy_(parts.transpose(0, 1))

    return gathered.view(b, tp.size * s, h), Work(finish=finish)


def scatter_sequence(x: Tensor, tp: Group, purpose: str) -> tuple[Tensor, Work]:
    """Reduce-scatter x [b, s, h] of t ranks along the sequence to [b, s/t, h], valid after the work's `wait`."""
    b, s, h = x.shape
    part = torch.empty((b, s // tp.size, h), dtype=x.dtype, device=x.device)
    parts = x.view(b, tp.size, s // tp.size, h).transpose(0, 1).contiguous()
    return part, tp.reduce_scatter(part.view(-1), parts.view(-1), purpose)


def weight_gradient(weight: Tensor, rows: Tensor, x: Tensor) -> Tensor | None:
    """Return rows^T x, a linear layer's weight gradient, from its output gradient `rows` [n, o] and input x [n, i].

    Return None if `weight.gradient_sink`, a function, adds the product directly to the gradient bucket.
    `GradientReducer` sets this function on weights that are used once per backward pass.
    """
    sink = getattr(weight, "gradient_sink", None)
    if sink is None:
        return rows.t().matmul(x).view(weight.shape)
    sink(rows, x)
    return None


class _Linear(torch.autograd.Function):
    """Linear layers y = x w^T + b of one input x and several weights w.

    With a tp group, the layers are column-parallel: each rank has a part of the rows of w (Megatron's operator f).
    Backward sums the input's gradient over tp while it computes the gradients of the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: Group | None, sp: bool, purpose: str, plain: bool, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.tp, ctx.sp, ctx.purpose, ctx.plain = tp, sp, purpose, plain
        ctx.has_bias = [bias is not None for bias in biases]
        if sp and tp is not None:
            x, work = gather_sequence(x, tp, purpose)
            work.wait()
        pairs = zip(weights, biases, strict=True)
        return tuple(F.linear(x, w.flatten(0, -2), bias) for w, bias in pairs if w is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp: Group | None = ctx.tp
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        work = gathered = Work()
        if tp is not None and ctx.sp:
            # Forward saved only this rank's part of the input, so backward gathers the full input again.
            x, gathered = gather_sequence(x, tp, ctx.purpose)
        dx = gradients[0].matmul(weights[0].flatten(0, -2))
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx = torch.addmm(dx.flatten(0, -2), gradient.flatten(0, -2), weight.flatten(0, -2)).view(dx.shape)
        if tp is not None:
            if ctx.sp:
                dx, work = scatter_sequence(dx, tp, ctx.purpose)
            else:
                work = tp.all_reduce(dx, SUM, ctx.purpose)
        gathered.wait()
        found: list[Tensor | None] = []
        for gradient, weight, has_bias in zip(gradients, weights, ctx.has_bias, strict=True):
            rows = gradient.flatten(0, -2)
            dw = weight_gradient(weight, rows, x.flatten(0, -2))
            found += [dw, kernels.sum_rows(rows, plain=ctx.plain) if has_bias else None]
        work.wait()
        return dx, None, None, None, None, *found


class _ReduceOutput(torch.autograd.Function):
    """Megatron's operator g: all-reduce over tp; with sequence parallelism, reduce-scatter (backward: all-gather)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group, sp: bool, purpose: str) -> Tensor:
        ctx.tp, ctx.sp, ctx.purpose = tp, sp, purpose
        if sp:
            x, work = scatter_sequence(x, tp, purpose)
            work.wait()
            return x
        ctx.mark_dirty(x)
        tp.all_reduce(x, SUM, purpose).wait()
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        if ctx.sp:
            gradient, work = gather_sequence(gradient, ctx.tp, ctx.purpose)
            work.wait()
        return gradient, None, None, None


def reduce_output(x: Tensor, tp: Group, sp: bool, purpose: str) -> Tensor:
    """Sum partial results x [b, s, h] of all tp ranks by all-reduce, or with `sp` by reduce-scatter to [b, s/t, h]."""
    return x if tp.size == 1 else _ReduceOutput.apply(x, tp, sp, purpose)


Column = tuple[Tensor, Tensor | None]
"""Weight and bias of a column-parallel linear layer on one tp rank: rows [..., h] of the weight, part of the bias."""


def column_linears(
    x: Tensor, columns: Sequence[Column], tp: Group, sp: bool, purpose: str, *, plain: bool = False
) -> tuple[Tensor, ...]:
    """Return the outputs [b, s, o/t] of column-parallel linear layers of one input x [b, s, h] (`sp`: [b, s/t, h]).

    x is gathered once for all weights, and its gradient is summed once. o: outputs of a weight, t: tp ranks. `plain`:
    compute gradients of biases by torch's operator instead of this suite's kernel.
    """
    parameters = [tensor for column in columns for tensor in column]
    split = tp if tp.size > 1 else None
    return _Linear.apply(x, split, sp, purpose, plain, *parameters)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, sp: bool, purpose: str
) -> Tensor:
    """Return the output [b, s, o/t] of one column-parallel linear layer."""
    return column_linears(x, [(weight, bias)], tp, sp, purpose)[0]


def row_products(x: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's summand [b, s, o] of a row-parallel linear layer, from x [b, s, i/t] and `weight` [o, i/t]."""
    (found,) = _Linear.apply(x, None, False, "", False, weight, None)
    return found


def row_linear(x: Tensor, weight: Tensor, tp: Group, sp: bool, purpose: str) -> Tensor:
    """Return a row-parallel linear layer's output, summed over tp: [b, s, o], or with `sp` this rank's [b, s/t, o]."""
    return reduce_output(row_products(x, weight), tp, sp, purpose)


def split_parameter(
    shape: tuple[int, ...], split: int | None, tp: Group, init: str, *, used_once: bool = False
) -> nn.Parameter:
    """Return a parameter of full `shape` of which each tp rank holds an equal part of dimension `split`.

    `init`: the initial values, `normal`, `residual` (normal / sqrt(2 layers)), `zeros` or `ones`.
    `used_once`: only one linear layer uses the parameter in a pass, so its gradient may skip autograd's accumulation.
    """
    local = list(shape)
    if split is not None:
        assert local[split] % tp.size == 0
        local[split] //= tp.size
    with storage.unobserved():
        parameter = nn.Parameter(torch.empty(local, device="meta"))
    vars(parameter).update(split=split, init=init, partial=False, used_once=used_once)
    return parameter


def embed(tokens: Tensor, weight: Tensor, tp: Group) -> Tensor:
    """Return embeddings [b, s, h] of tokens [b, s] from this tp rank's rows [V/t, h]; 0 for other ranks' tokens."""
    if tp.size == 1:
        return F.embedding(tokens, weight)
    local = tokens - tp.rank * weight.shape[0]
    outside = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(outside, 0), weight)
    return rows.masked_fill(outside.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: Group, plain: bool) -> Tensor:
        start = tp.rank * logits.shape[1]
        maximum = kernels.cross_entropy_max(logits, plain=plain)
        tp.all_reduce(maximum, MAX, "cross-entropy").wait()
        sums = kernels.cross_entropy_sums(logits, maximum, targets, start, plain=plain)
        tp.all_reduce(sums, SUM, "cross-entropy").wait()
        ctx.save_for_backward(logits, maximum, sums, targets)
        ctx.start, ctx.plain = start, plain
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, maximum, sums, targets = ctx.saved_tensors
        # The gradient overwrites the logits to save memory, because the logits are the largest activation.
        with torch.no_grad():
            kernels.cross_entropy_backward_(
                logits.detach(),
                maximum,
                sums,
                targets,
                ctx.start,
                gradients[0].float().contiguous(),
                plain=ctx.plain,
            )
        return logits, None, None, None


class _LossParallel(torch.autograd.Function):
    """Vocabulary-parallel cross-entropy by the operators of `torch.distributed.tensor.parallel.loss_parallel`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: Group) -> Tensor:
        maximum = logits.amax(1, keepdim=True)
        tp.all_reduce(maximum, MAX, "cross-entropy").wait()
        shifted = logits - maximum
        total = shifted.exp().sum(1, keepdim=True)
        tp.all_reduce(total, SUM, "cross-entropy").wait()
        logarithms = shifted - total.log()
        local = (targets - tp.rank * logits.shape[1]).unsqueeze(1)
        outside = (local < 0) | (local >= logits.shape[1])
        chosen = logarithms.gather(1, local.masked_fill_(outside, 0))
        loss = -chosen.masked_fill(outside, 0.0).squeeze(1)
        tp.all_reduce(loss, SUM, "cross-entropy").wait()
        ctx.save_for_backward(logarithms, local, outside)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logarithms, local, outside = ctx.saved_tensors
        gradient = torch.zeros_like(logarithms).scatter_(1, local, outside.float() - 1)
        return (gradient + logarithms.exp()) * gradients[0].unsqueeze(1), None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, tp: Group, *, plain: bool = False, copies_to_fp32: bool = False
) -> Tensor:
    """Return the loss per token, fp32 [n], from each rank's logits [n, V/t] and targets [n] (1909.08053 sec. 3).

    No rank ever has a full row of logits. Backward overwrites `logits`. `plain`: use torch's operators instead of
    kernels. `copies_to_fp32`: copy the logits to fp32 and retain the logarithms of all probabilities, as torch does.
    """
    if not copies_to_fp32:
        return _CrossEntropy.apply(logits, targets, tp, plain)
    if tp.size > 1:
        return _LossParallel.apply(logits.float(), targets, tp)
    return F.cross_entropy(logits.float(), targets, reduction="none")
