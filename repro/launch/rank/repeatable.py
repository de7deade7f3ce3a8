"""The same bits from a training whenever it is run: what that takes on GPUs.

Our kernels add in an order that only the sizes and the GPU's model decide (no atomics in `kernels/*.cu`).  Others do
not: the backward of torch's fused attention adds the queries' gradients with atomics unless it is told otherwise.  What
cuBLAS and NCCL have to be told is in the environment (`repro.launch.rank.gpu_settings.REPEATABLE`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """torch's deterministic algorithms, where `wanted`, and as it was before afterwards.

    An operator that has none raises RuntimeError.
    """
    if not wanted:
        yield
        return
    settings = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # every buffer at every use: nothing is read unwritten
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
