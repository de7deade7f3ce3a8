"""The three local steps of vocabulary-parallel cross-entropy (Megatron-LM, 1909.08053, section 3).

A rank has the v columns of the logits from `vocab_start` on. Between the steps, the caller reduces row maxima and sums
over the tensor-parallel group. The loss is log(sums[0]) - sums[1], and the gradient replaces the logits in place.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, pointer, source_type
from repro.kernels.library import Cost, Operand, accumulation_dtype, no_result, operator, row_chunks

MAX_BLOCKS_PER_PROCESSOR = 64
"""Maximum number of thread blocks per multiprocessor in the cross-entropy kernels."""


@cache
def program(kind: str) -> Program:
    """Return the CUDA program of cross-entropy for logits of type `kind`, a type name of the CUDA sources."""
    kernels = ("maxima", "sums", "gradient")
    return Program("cross_entropy", (("TYPE", kind),), struct.Struct("@PPPPPqqq"), kernels, 512)


def examples() -> list[Program]:
    """Return example CUDA programs of cross-entropy, for bf16 and fp16 logits."""
    return [program("bfloat16"), program("half")]


def launch_cross_entropy_max(on: KernelLauncher, logits: Tensor) -> Tensor:
    """Launch the kernel that computes the row maxima of the logits, and return the maxima, fp32 [n]."""
    logits = logits.contiguous()
    maximum = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch(on, "maxima", logits, maximum, None, None, None, 0)
    return maximum


def launch_cross_entropy_sums(
    on: KernelLauncher, logits: Tensor, maximum: Tensor, targets: Tensor, vocab_start: int
) -> Tensor:
    """Launch the kernel that computes the two sums of `cross_entropy_sums` per row, and return them, fp32 [2, n]."""
    sums = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch(on, "sums", logits.contiguous(), maximum, sums, targets, None, vocab_start)
    return sums


def launch_cross_entropy_backward_(
    on: KernelLauncher,
    logits: Tensor,
    maximum: Tensor,
    sums: Tensor,
    targets: Tensor,
    vocab_start: int,
    grad_loss: Tensor,
) -> None:
    """Launch the cross-entropy kernel that overwrites the logits by their gradient."""
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
    kind = program(source_type(logits))
    vectors = [t if t is None else t.contiguous() for t in (maximum, sums, targets, grad)]
    if {t.dtype for t in (maximum, sums, grad) if t is not None} != {torch.float32}:
        raise Unavailable("cross-entropy needs maxima, sums and gradients of the loss in fp32")
    if targets is not None and targets.dtype != torch.int64:
        raise Unavailable("cross-entropy needs targets in int64")
    rows = logits.shape[0]
    if rows:
        pointers = map(pointer, (logits, *vectors))
        arguments = kind.arguments.pack(*pointers, vocab_start, *logits.shape)
        on.load(kind).launch(kernel, min(rows, MAX_BLOCKS_PER_PROCESSOR * on.processors), arguments)


def reference_max(logits: Tensor) -> Tensor:
    """Compute the row maxima of the logits with plain torch operators in the dtype of the logits."""
    return logits.amax(-1)


def reference_sums(logits: Tensor, maximum: Tensor, targets: Tensor, vocab_start: int) -> Tensor:
    """Compute the sums of `cross_entropy_sums` with plain torch operators in the dtype of the arguments."""
    shifted = logits - maximum[:, None]
    hit = targets[:, None] == torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    return torch.stack([shifted.exp().sum(1), torch.where(hit, shifted, 0.0).sum(1)])


def reference_gradient(
    logits: Tensor, maximum: Tensor, sums: Tensor, targets: Tensor, vocab_start: int, grad_loss: Tensor
) -> Tensor:
    """Return the gradient of the logits, (softmax - onehot) * grad_loss, computed with plain torch operators."""
    hit = targets[:, None] == torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    probability = (logits - maximum[:, None]).exp() / sums[0, :, None]
    return (probability - hit.to(logits.dtype)) * grad_loss[:, None]


def _max(logits: Tensor) -> Tensor:
    return logits.amax(-1).to(accumulation_dtype(logits.dtype))


def _local_targets(targets: Tensor, vocab_start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each target's local vocabulary column [n, 1], clamped, and whether this tp rank has the column."""
    local = (targets - vocab_start).unsqueeze(1)
    column = local.clamp(0, size - 1)
    return column, column == local


def _sums(logits: Tensor, maximum: Tensor, targets: Tensor, vocab_start: int) -> Tensor:
    wide, (rows, size) = accumulation_dtype(logits.dtype), logits.shape
    shift = maximum.to(wide).unsqueeze(1)
    out = torch.empty(2, rows, dtype=wide, device=logits.device)
    column, here = _local_targets(targets, vocab_start, size)
    out[1] = torch.where(here, logits.gather(1, column).to(wide) - shift, 0.0).squeeze(1)
    for first, last in row_chunks(rows, size, logits.device):
        torch.sum(torch.sub(logits[first:last], shift[first:last]).exp_(), 1, out=out[0, first:last])
    return out


def _backward(
    logits: Tensor, maximum: Tensor, sums: Tensor, targets: Tensor, vocab_start: int, grad_loss: Tensor
) -> None:
    wide, (rows, size) = accumulation_dtype(logits.dtype), logits.shape
    shift, scale = maximum.to(wide).unsqueeze(1), grad_loss.to(wide).unsqueeze(1)
    factor = scale / sums[0].to(wide).unsqueeze(1)
    column, here = _local_targets(targets, vocab_start, size)
    subtract = torch.where(here, -scale, 0.0)
    for first, last in row_chunks(rows, size, logits.device):
        part = logits[first:last]
        work = part.sub_(shift[first:last]) if logits.dtype == wide else part - shift[first:last]
        work.exp_().mul_(factor[first:last]).scatter_add_(1, column[first:last], subtract[first:last])
        if work is not part:
            part.copy_(work)


def _max_shape(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))


def _sums_shape(logits: Tensor, maximum: Tensor, targets: Tensor, vocab_start: int) -> Tensor:
    return logits.new_empty((2, logits.shape[0]), dtype=accumulation_dtype(logits.dtype))


max_operator = operator(
    "cross_entropy_max(Tensor logits) -> Tensor", _max, _max_shape, launch_cross_entropy_max
)
sums_operator = operator(
    "cross_entropy_sums(Tensor logits, Tensor maximum, Tensor targets, int vocab_start) -> Tensor",
    _sums,
    _sums_shape,
    launch_cross_entropy_sums,
)
backward_operator = operator(
    "cross_entropy_backward_(Tensor(a!) logits, Tensor maximum, Tensor sums, Tensor targets, int vocab_start,"
    " Tensor grad_loss) -> ()",
    _backward,
    no_result,
    launch_cross_entropy_backward_,
)


def _check(logits: Tensor, *vectors: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or any(v.shape != logits.shape[:1] for v in vectors):
        raise ValueError(
            f"cross-entropy needs logits [n, v] with v > 0 and one value per row, not {list(logits.shape)} "
            f"with {[list(v.shape) for v in vectors]}"
        )


def cross_entropy_max(logits: Tensor, *, plain: bool = False) -> Tensor:
    """Return the row maxima of this rank's logits [n, v], without gradient: fp32 [n], or fp64 for fp64 logits.

    `plain`: use torch's operators on every device.
    """
    _check(logits)
    return (_max if plain else max_operator)(logits.detach())


def cross_entropy_sums(
    logits: Tensor, maximum: Tensor, targets: Tensor, vocab_start: int, *, plain: bool = False
) -> Tensor:
    """Return fp32 [2, n] (fp64 for fp64 logits): row sums of exp(logit - maximum), and target logit - maximum.

    The second sum is 0 for targets outside this rank's columns. `targets`: int64 [n], indices in the full vocabulary.
    The operator has no gradient; `cross_entropy_backward_` computes that of the loss. `plain`: use torch's operators on
    every device. Raises ValueError if the sizes do not agree.
    """
    _check(logits, maximum, targets)
    return (_sums if plain else sums_operator)(logits.detach(), maximum, targets, vocab_start)


def cross_entropy_backward_(
    logits: Tensor,
    maximum: Tensor,
    sums: Tensor,
    targets: Tensor,
    vocab_start: int,
    grad_loss: Tensor,
    *,
    plain: bool = False,
) -> None:
    """Overwrite logits [n, v] by d loss / d logits = (softmax - onehot) * grad_loss.

    `maximum` and `sums` are reduced over the tensor-parallel group. `grad_loss` is fp32 [n], with 0 for rows without a
    loss. The arithmetic is fp32, rounded once to the dtype of the logits. `plain`: use torch's operators on every
    device. Raises ValueError if the sizes do not agree.
    """
    _check(logits, maximum, targets, grad_loss)
    if sums.shape != (2, *logits.shape[:1]):
        raise ValueError(f"cross-entropy needs sums [2, {logits.shape[0]}], not {list(sums.shape)}")
    replace = _backward if plain else backward_operator
    replace(logits.detach(), maximum, sums, targets, vocab_start, grad_loss)


def max_cost(logits: Operand) -> Cost:
    """Return the cost of row maxima of the logits: 1 FLOP (comparison) per logit."""
    return Cost(logits.numel, logits.nbytes, 4 * logits.shape[0])


def sums_cost(logits: Operand, maximum: Operand, targets: Operand, *_: object) -> Cost:
    """Return the cost of cross-entropy's sums: 3 FLOP per logit (shift, exp, sum). Each logit is read only once."""
    rows = logits.shape[0]
    return Cost(3 * logits.numel + rows, logits.nbytes + maximum.nbytes + targets.nbytes, 2 * 4 * rows)


def gradient_cost(logits: Operand, maximum: Operand, sums: Operand, targets: Operand, *_: object) -> Cost:
    """Return the cost of the gradient of cross-entropy in FLOP: 3 per logit (shift, exp, product), 2 per row."""
    rows = logits.shape[0]
    read = logits.nbytes + maximum.nbytes + sums.nbytes // 2 + targets.nbytes + 4 * rows
    return Cost(3 * logits.numel + 2 * rows, read, logits.nbytes)
