"""AdamW over flat shards in one pass: unscale gradients, update moments and fp32 master, write the 16-bit copy.

The arithmetic is that of `torch.optim.AdamW` (1711.05101). The master and two moments are the K = 12 bytes of optimizer
state per parameter in the ZeRO paper.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.kernels.cuda.program import (
    KernelLauncher,
    Program,
    Unavailable,
    pack_launches,
    pointer,
    source_type,
)
from repro.kernels.library import DEVICE_CHUNK, Cost, Operand, no_result, operator

MAX_SHARDS = 48
"""Maximum number of shards per kernel launch, because the arguments of a CUDA kernel are limited to 4096 bytes."""
BLOCK_ELEMENTS = 8192
"""Number of elements of a shard that a thread block of the AdamW kernel processes at once."""


class Scalars(NamedTuple):
    """Arguments of the AdamW operator after its lists of shards, in the order of the operator's schema."""

    step: Tensor
    lr: Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


@cache
def adamw_arguments(count: int) -> struct.Struct:
    """Return the `struct` format of the AdamW kernel's arguments for `count` shards, padded to the maximum number."""
    rest = MAX_SHARDS - count
    return struct.Struct(f"@{'PPPPPq' * count}{48 * rest}x{count}i{4 * rest}xPPPP6fi0P")


@cache
def program(gradient: str, copy: str) -> Program:
    """Return the CUDA program of AdamW for types of gradients and 16-bit copies; an empty `copy` means no copies."""
    definitions = (
        ("GRADIENT", gradient),
        ("COPY", copy or "float"),
        ("HAS_COPY", int(bool(copy))),
        ("SHARDS", MAX_SHARDS),
        ("CHUNK", BLOCK_ELEMENTS),
    )
    return Program("adamw", definitions, adamw_arguments(MAX_SHARDS), ("adamw",), 256)


def examples() -> list[Program]:
    """Return example CUDA programs of AdamW: for training in fp16 with fp32 gradients, and in bf16."""
    return [program("float", "half"), program("bfloat16", "bfloat16")]


def launch_adamw_(
    on: KernelLauncher,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    *scalars: Any,
) -> None:
    """Launch the AdamW kernel once per 48 shards that have equal dtypes of gradient and 16-bit copy."""
    at = Scalars(*scalars)
    states, pointed = [*masters, *exp_avgs, *exp_avg_sqs], (at.step, at.lr, at.grad_scale, at.found_inf)
    if {t.dtype for t in [*states, *pointed] if t is not None} != {torch.float32}:
        raise Unavailable("adamw_ needs master weights, moments and scalars in fp32")
    if not all(t.is_contiguous() for t in [*states, *grads, *copies]):
        raise Unavailable("adamw_ needs contiguous shards")
    betas = (at.beta1, at.beta2)
    tail = (*map(pointer, pointed), *betas, *map(_log_or_minus_inf, betas), at.eps, at.weight_decay)
    shards: list[tuple[Program, tuple[int, ...]]] = []
    for i, grad in enumerate(grads):
        kind = program(source_type(grad), source_type(copies[i]) if copies else "")
        pointers = (masters[i].data_ptr(), grad.data_ptr(), exp_avgs[i].data_ptr(), exp_avg_sqs[i].data_ptr())
        copy = copies[i].data_ptr() if copies else 0
        shards.append((kind, (*pointers, copy, masters[i].numel())))
    for loaded, part, chunks, blocks in pack_launches(on, shards, MAX_SHARDS, BLOCK_ELEMENTS):
        arguments = adamw_arguments(len(part)).pack(*chain.from_iterable(part), *chunks, *tail, len(part))
        loaded.launch("adamw", blocks, arguments)


def _log_or_minus_inf(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


CPU_CHUNK_ELEMENTS = 2**20
"""Elements of a 16-bit gradient that torch's operators convert to fp32 at once on a CPU; `DEVICE_CHUNK` on a GPU."""


def reference(
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    **scalars: Any,
) -> None:
    """Compute the AdamW step with plain torch operators, which allocate temporaries and do not wait for the device."""
    step, lr, beta1, beta2, eps, weight_decay, grad_scale, found_inf = Scalars(**scalars)
    go = torch.ones((), dtype=torch.bool, device=step.device) if found_inf is None else found_inf == 0
    for master, grad, exp_avg, exp_avg_sq in zip(masters, grads, exp_avgs, exp_avg_sqs, strict=True):
        g = grad.to(master.dtype) if grad_scale is None else grad.to(master.dtype) / grad_scale
        decayed = master * (1 - lr * weight_decay)
        first = exp_avg + (1 - beta1) * (g - exp_avg)
        second = beta2 * exp_avg_sq + (1 - beta2) * g * g
        denominator = second.sqrt() / (1 - beta2**step).sqrt() + eps
        updated = decayed - lr / (1 - beta1**step) * first / denominator
        for state, value in ((master, updated), (exp_avg, first), (exp_avg_sq, second)):
            state.copy_(torch.where(go, value, state))
    for copy, master in zip(copies, masters, strict=bool(copies)):
        copy.copy_(master)


@torch.no_grad()
def _adamw(
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    *scalars: Any,
) -> None:
    options = Scalars(*scalars)._asdict()
    if not (hasattr(torch, "_fused_adamw_") and masters[0].device.type in ("cpu", "cuda")):
        reference(masters, grads, exp_avgs, exp_avg_sqs, copies, **options)
        return
    step = options.pop("step")

    def update(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
        torch._fused_adamw_(p, g, m, v, [], [step] * len(p), amsgrad=False, maximize=False, **options)

    ready = [i for i, (p, g) in enumerate(zip(masters, grads, strict=True)) if p.dtype == g.dtype]
    if ready:
        update(*([tensors[i] for i in ready] for tensors in (masters, grads, exp_avgs, exp_avg_sqs)))
        if copies:
            torch._foreach_copy_([copies[i] for i in ready], [masters[i] for i in ready])
    narrow = [i for i in range(len(masters)) if masters[i].dtype != grads[i].dtype]
    if not narrow:
        return
    chunk = CPU_CHUNK_ELEMENTS if masters[0].device.type == "cpu" else DEVICE_CHUNK
    sizes = {i: masters[i].numel() for i in narrow}
    buffer = torch.empty(min(chunk, sum(sizes.values())), dtype=masters[0].dtype, device=masters[0].device)
    for group in _chunk_groups(sizes, chunk):
        lists = (masters, grads, exp_avgs, exp_avg_sqs)
        own, given, first, second = ([tensors[i][part] for i, part in group] for tensors in lists)
        lengths = [each.numel() for each in own]
        wide = list(buffer[: sum(lengths)].split(lengths))
        torch._foreach_copy_(wide, given)
        update(own, wide, first, second)
        if copies:
            torch._foreach_copy_([copies[i][part] for i, part in group], own)


def _chunk_groups(sizes: dict[int, int], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Yield groups of slices (tensor index, slice) that cover tensors of the given sizes, `most` elements per group."""
    group: list[tuple[int, slice]] = []
    free = most
    for i, size in sizes.items():
        start = 0
        while start < size:
            stop = min(size, start + free)
            group.append((i, slice(start, stop)))
            free -= stop - start
            start = stop
            if not free:
                yield group
                group, free = [], most
    if group:
        yield group


adamw_operator = operator(
    "adamw_(Tensor(a!)[] masters, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs,"
    " Tensor(e!)[] copies, Tensor step, Tensor lr, float beta1, float beta2, float eps, float weight_decay,"
    " Tensor? grad_scale, Tensor? found_inf) -> ()",
    _adamw,
    no_result,
    launch_adamw_,
)


def adamw_(
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    *,
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    plain: bool = False,
) -> None:
    """Perform one AdamW step over flat shards: 1-D tensors, of which element i of every list belongs to shard i.

    `masters`, `exp_avgs` and `exp_avg_sqs` are fp32 and updated in place. `grads` are fp32, bf16 or fp16 and may be
    overwritten. `copies` are the 16-bit parameters that receive the new masters; empty if the masters are the
    parameters. `step` (from 1), `lr`, `grad_scale` (divisor of the gradients) and `found_inf` (1: skip the update) are
    0-dim fp32 tensors on the device. The caller must not increment `step` after a skipped update. `plain`: use torch's
    fused AdamW on every device. Raises ValueError if the lists do not match or are empty.
    """
    count = len(masters)
    lengths = [len(grads), len(exp_avgs), len(exp_avg_sqs), len(copies) or count]
    if count == 0 or any(length != count for length in lengths):
        raise ValueError(
            f"adamw_ needs one gradient, two moments and one or no copy per master, not {lengths} for {count}"
        )
    for i, master in enumerate(masters):
        if master.dim() != 1 or any(
            t[i].shape != master.shape for t in (grads, exp_avgs, exp_avg_sqs, copies or masters)
        ):
            raise ValueError(
                f"adamw_ needs 1-D tensors of one length; shard {i} has a master of {list(master.shape)}"
            )
    update = _adamw if plain and not masters[0].is_meta else adamw_operator
    scalars = Scalars(step, lr, beta1, beta2, eps, weight_decay, grad_scale, found_inf)
    update(masters, grads, exp_avgs, exp_avg_sqs, copies, *scalars)


def cost(
    masters: list[Operand],
    grads: list[Operand],
    exp_avgs: list[Operand],
    exp_avg_sqs: list[Operand],
    copies: list[Operand],
    *_: object,
    **__: object,
) -> Cost:
    """Return AdamW's cost: 14 FLOP per element (unscale 1, decay 1, moments 3 + 4, sqrt, eps, quotient 3, update 2)."""
    states = sum(operand.nbytes for group in (masters, exp_avgs, exp_avg_sqs) for operand in group)
    written = states + sum(operand.nbytes for operand in copies)
    return Cost(14 * sum(m.numel for m in masters), states + sum(g.nbytes for g in grads), written)
