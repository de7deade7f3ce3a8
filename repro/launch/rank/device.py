"""Which device a rank computes on.  Imports torch only where there may be a GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def own_device(kind: str) -> torch.device:
    """The device of this rank: `cpu`, or on `cuda` the GPU of its place in its node (`LOCAL_RANK`)."""
    import torch

    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", cuda_index(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))


def cuda_index(local_rank: int, visible: int) -> int:
    """Index of a rank's GPU among the `visible` ones: all of the node's, or just its own.

    Never `rank % visible`: ranks of a node need not start at a multiple of its GPUs.
    """
    if visible == 1:  # a scheduler that binds each task to a GPU shows it nothing else
        return 0
    if local_rank >= visible:
        raise RuntimeError(f"no GPU for local rank {local_rank}: {visible} visible")
    return local_rank
