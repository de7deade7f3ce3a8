"""Stage 3 as it was released in March 2021: parameter by parameter, in lists of the ranks' parts.

DeepSpeed 0.3.13 (`deepspeed/runtime/zero/partition_parameters.py`, `stage3.py`) hands torch.distributed a list of
tensors, one a rank, for every gather and every reduce-scatter: Python makes a view for each, NCCL has one buffer, and
each part is copied from or to it.  Its host waits for the device before it makes the list of a gather, and once that is
over.  Among thousands of ranks the host is what a step then waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

STAYS_BELOW = 100_000
"""Elements of a parameter from which on it is gathered by itself and freed after its use: DeepSpeed's
`param_persistence_threshold`."""
REUSED_WITHIN = 1_000_000_000
"""Elements of others that are used between two uses of a parameter, from which on it is freed meanwhile: its
`max_reuse_distance`."""


def is_small(parameter: Parameter) -> bool:
    """Whether the parameter stays where others are gathered one by one."""
    return parameter.numel() < STAYS_BELOW


def reused_late(elements: Sequence[int]) -> list[bool]:
    """Of a block's parameters in the order of their use, which are freed between its second forward pass, of a
    checkpoint, and its backward pass: between the two come all later ones, forwards and backwards."""
    return [2 * sum(elements[i + 1 :]) >= REUSED_WITHIN for i in range(len(elements))]


class Parts:
    """The equal parts of a flat tensor, a view for each.

    Without data (`meta`) none is made, for there may be thousands: who follows the step is told how many.
    """

    def __init__(self, flat: Tensor, count: int, *, flattened: bool = False):
        """`flattened`: each is taken of one more view, which is made anew for it, as of a gradient that has a shape."""
        self._flat, self._count = flat, count
        self._views: list[Tensor] = []
        if flat.is_meta:
            self._tell("listed", count * (1 + flattened))
            return
        size = flat.numel() // count
        for part in range(count):
            whole = flat.view(-1) if flattened else flat
            self._views.append(whole.narrow(0, part * size, size))

    def take(self, source: Tensor) -> None:
        """Copy flat `source` into them, one by one."""
        self._copy(self._views, source)

    def give(self, to: Tensor) -> None:
        """Copy them into flat `to`, one by one."""
        self._copy(to, self._views)

    def _copy(self, to: Tensor | list[Tensor], source: Tensor | list[Tensor]) -> None:
        if self._flat.is_meta:
            self._tell("copied", self._count)
            return
        for place, part in zip(self._chunks(to), self._chunks(source), strict=True):
            place.copy_(part)

    def _chunks(self, whole: Tensor | list[Tensor]) -> Iterable[Tensor]:
        return whole.chunk(self._count) if isinstance(whole, Tensor) else whole

    def _tell(self, what: str, count: int) -> None:
        follower = follower_of(self._flat)
        if follower is not None:
            getattr(follower, what)(self._flat, count)


def wait_for_device(like: Tensor) -> None:
    """Have the host wait until `like`'s device has done all that it was asked to."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    elif like.is_meta and (follower := follower_of(like)) is not None:
        follower.waited()


def follower_of(tensor: Tensor) -> Any:
    """Who follows a storage without data (`repro.simulate`)."""
    return getattr(tensor.untyped_storage(), "watcher", None)
