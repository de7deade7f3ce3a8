"""C_B: constant size of fused communication buffers (1910.02054 sec. 6.2).

Without C_B, libraries copied all gradients to one fp32 buffer of 4 Psi bytes before the reduction, because large
messages use links better (sec. 3.2). With C_B gradients are reduced in place, in buckets of one size for every model.
ZeRO stage 3 communicates one block at a time and has no fused buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group, Work


def bucket_numel(total: int, bucket_bytes: int, dtype: torch.dtype, *, constant: bool) -> int:
    """Return the maximum elements of a gradient bucket: all `total`, or those of `bucket_bytes` if `constant` (C_B)."""
    return bucket_bytes // dtype.itemsize if constant else total


def reduce_fused(gradients: Tensor, target: Tensor, group: Group, *, add: bool) -> Work:
    """Reduce flat `gradients` [P] over `group` through one fused fp32 buffer of 4P bytes (without C_B).

    After `wait` of the result, `target` contains the full sum [P] (by all-reduce), or this rank's shard [P/n] of the
    sum (by reduce-scatter). `add`: add the sum to the values in `target`.
    """
    buffer = storage.empty(gradients.numel(), gradients, Category.COMMUNICATION, torch.float32)
    buffer.copy_(gradients)
    if target.numel() == buffer.numel():
        total = buffer
        work = group.all_reduce(buffer, purpose="gradients")
    else:
        total = buffer[group.rank * target.numel() :][: target.numel()]
        work = group.reduce_scatter(total, buffer, purpose="gradients")

    def finish() -> None:
        work.wait()
        if add:
            target.add_(total)
        else:
            target.copy_(total)

    return Work(finish=finish)
