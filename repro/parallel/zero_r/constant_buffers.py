"""C_B: what is fused for communication has a constant size (1910.02054 sec. 6.2).

Large messages use links better than small ones, so libraries fused all gradients in one buffer before they reduced
them: in fp32 4 Psi bytes, which grow with the model (sec. 3.2).  With C_B the gradients are reduced bucket by bucket,
large enough for the links and of one size whatever the model, and where they are, without a copy.  (Stage 3
communicates a block at a time and has nothing to fuse.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group, Work


def bucket_numel(total: int, bucket_bytes: int, dtype: torch.dtype, *, constant: bool) -> int:
    """Elements of one bucket at most, of `total` gradients of `dtype`: without C_B (`constant`) all of them."""
    return bucket_bytes // dtype.itemsize if constant else total


def reduce_fused(gradients: Tensor, target: Tensor, group: Group, *, add: bool) -> Work:
    """Without C_B: sum flat `gradients` [P] over `group` through an fp32 copy of them, 4P bytes made for it.

    `target` gets the sum when the work is done: all of it [P], by an all-reduce, or this rank's shard [P/n], by a
    reduce-scatter.  `add`: to what is there.
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
