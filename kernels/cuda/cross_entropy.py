"""Binding of `cross_entropy.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, type_of

BLOCKS = 64
"""Most blocks on a multiprocessor."""


@cache
def program(kind: str) -> Program:
    """For logits of this type."""
    kernels = ("maxima", "sums", "gradient")
    return Program("cross_entropy", (("TYPE", kind),), struct.Struct("@PPPPPqqq"), kernels, 512)


def examples() -> list[Program]:
    """In 16 bits."""
    return [program("bfloat16"), program("half")]


def cross_entropy_max(on: KernelLauncher, logits: Tensor) -> Tensor:
    """Row maxima, fp32 [n]."""
    logits = logits.contiguous()
    maximum = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch(on, "maxima", logits, maximum, None, None, None, 0)
    return maximum


def cross_entropy_sums(
    on: KernelLauncher, logits: Tensor, maximum: Tensor, targets: Tensor, vocab_start: int
) -> Tensor:
    """fp32 [2, n]."""
    sums = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch(on, "sums", logits.contiguous(), maximum, sums, targets, None, vocab_start)
    return sums


def cross_entropy_backward_(
    on: KernelLauncher,
    logits: Tensor,
    maximum: Tensor,
    sums: Tensor,
    targets: Tensor,
    vocab_start: int,
    grad_loss: Tensor,
) -> None:
    """The gradient replaces the logits."""
    if not logits.is_contiguous():
        raise Unavailable("cross_entropy_backward_ needs contiguous logits, which it overwrites")
    _launch(on, "gradient", logits, maximum, sums, targets, grad_loss, vocab_start)


def _launch(
    on: KernelLauncher,
    kernel: str,
    logits: Tensor,
    maximum: Tensor,
    sums: Tensor | None,
    targets: Tensor | None,
    grad: Tensor | None,
    vocab_start: int,
) -> None:
    kind = program(type_of(logits))
    vectors = [t if t is None else t.contiguous() for t in (maximum, sums, targets, grad)]
    if {t.dtype for t in (maximum, sums, grad) if t is not None} != {torch.float32}:
        raise Unavailable("cross-entropy needs maxima, sums and gradients of the loss in fp32")
    if targets is not None and targets.dtype != torch.int64:
        raise Unavailable("cross-entropy needs targets in int64")
    rows = logits.shape[0]
    if rows:
        pointers = [0 if t is None else t.data_ptr() for t in (logits, *vectors)]
        arguments = kind.arguments.pack(*pointers, vocab_start, *logits.shape)
        on.load(kind).launch(kernel, min(rows, BLOCKS * on.processors), arguments)
