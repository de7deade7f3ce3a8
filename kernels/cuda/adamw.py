"""Binding of `adamw.cu`."""

from __future__ import annotations

import math
import struct
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from repro.kernels.cuda.lists import parts
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, type_of

SHARDS = 48
"""Shards in one launch: their pointers travel as arguments, of which there may be 4096 bytes."""
CHUNK = 8192
"""Elements that a block takes at once."""


@cache
def layout(count: int) -> struct.Struct:
    """The arguments with so many shards, and zeros where there is room for more."""
    rest = SHARDS - count
    return struct.Struct(f"@{'PPPPPq' * count}{48 * rest}x{count}i{4 * rest}xPPPP6fi0P")


@cache
def program(gradient: str, copy: str) -> Program:
    """For gradients and copies of these types; no copies where `copy` is empty."""
    definitions = (
        ("GRADIENT", gradient),
        ("COPY", copy or "float"),
        ("HAS_COPY", int(bool(copy))),
        ("SHARDS", SHARDS),
        ("CHUNK", CHUNK),
    )
    return Program("adamw", definitions, layout(SHARDS), ("adamw",), 256)


def examples() -> list[Program]:
    """What training in fp16 on fp32 gradients compiles, and in bf16."""
    return [program("float", "half"), program("bfloat16", "bfloat16")]


def adamw_(
    on: KernelLauncher,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One launch for every 48 shards of the same types."""
    states, scalars = [*masters, *exp_avgs, *exp_avg_sqs], [step, lr, grad_scale, found_inf]
    if {t.dtype for t in [*states, *scalars] if t is not None} != {torch.float32}:
        raise Unavailable("adamw_ needs masters, moments and scalars in fp32")
    if not all(t.is_contiguous() for t in [*states, *grads, *copies]):
        raise Unavailable("adamw_ needs contiguous shards")
    tail = (
        step.data_ptr(),
        lr.data_ptr(),
        0 if grad_scale is None else grad_scale.data_ptr(),
        0 if found_inf is None else found_inf.data_ptr(),
        *(beta1, beta2, _log(beta1), _log(beta2), eps, weight_decay),
    )
    shards: list[tuple[Program, tuple[int, ...]]] = []
    for i, grad in enumerate(grads):
        kind = program(type_of(grad), type_of(copies[i]) if copies else "")
        pointers = (masters[i].data_ptr(), grad.data_ptr(), exp_avgs[i].data_ptr(), exp_avg_sqs[i].data_ptr())
        copy = copies[i].data_ptr() if copies else 0
        shards.append((kind, (*pointers, copy, masters[i].numel())))
    for loaded, part, chunks, blocks in parts(on, shards, SHARDS, CHUNK):
        arguments = layout(len(part)).pack(*chain.from_iterable(part), *chunks, *tail, len(part))
        loaded.launch("adamw", blocks, arguments)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
