"""Parameters in one flat buffer, of which under stage 3 a rank keeps its shard.

That is all that parameters need which are not trained; a trained bucket (`flat_buffer`) adds gradients and what the
optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group, Work
from repro.parallel.zero.by_parameter import Parts, is_small, wait_for_device
from repro.parallel.zero.partition import BucketPlan

InitialValues = Callable[[int, int, int], Tensor]
"""(parameter index, start, stop) -> fp32 values of those elements of the (tp-local) parameter, flat."""

CHUNK = 1 << 22
"""Elements that are initialised at once, so that start-up needs no more memory than a step."""


@dataclass(frozen=True)
class Tag:
    """What separates elements of a shard."""

    group: int
    """Index of the optimizer's parameter group."""
    duplicate: bool = False
    """Every tp rank holds the same values; the global norm counts them once."""
    tied: bool = False
    """The first and the last pipeline stage both hold it; their gradients are summed before the step."""
    partial: bool = False
    """Each tp rank's gradient covers its part of the sequence only (sp); they are summed before the step."""


def _chunks(first: int, last: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """first..last in pieces of `CHUNK` elements; without data (`meta`) one stands for all."""
    for start in range(first, last, CHUNK):
        yield start, min(start + CHUNK, last)
        if like.is_meta:
            return


class FlatParameters:
    """`parameters[i]` is the parameter of `plan.slots[i]`, a view of `full`; values come by `fill`."""

    def __init__(
        self,
        plan: BucketPlan[Tag],
        parameters: Sequence[Parameter],
        *,
        stage: int,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        by_parameter: bool = False,
    ):
        """`by_parameter`: as stage 3 was released in March 2021 (`zero3_gather` of a layout)."""
        self.plan, self.parameters, self.stage, self.group = plan, list(parameters), stage, group
        self.in_parts = by_parameter and group.size > 1
        """Communicate lists of the ranks' parts, each of which is copied."""
        self.stays = by_parameter and is_small(self.parameters[0])
        """Once gathered, whole until the optimizer's step."""
        self.part = group.rank if stage >= 1 else 0
        """Which shard is this rank's: what its optimizer updates, and under stage 3 all that it keeps."""
        like = torch.empty(0, dtype=dtype, device=device)
        self.full = storage.empty(plan.padded, like, Category.PARAMETERS)
        """All parameters, flat [padded]; released between uses under stage 3."""
        if stage == 3:
            self.shard = storage.zeros(plan.shard, like, Category.PARAMETERS)
        else:
            self._clear_padding(self.full)
            size = plan.shard if stage else plan.padded
            self.shard = self.full[self.part * size : (self.part + 1) * size]
        for parameter, view in zip(self.parameters, self._views_of(self.full), strict=True):
            parameter.data = view
            parameter.grad = None  # of an earlier backward pass; it would be added to the first step's
        if stage == 3:
            storage.release(self.full)

    def _clear_padding(self, flat: Tensor) -> None:
        if self.plan.padded > self.plan.numel:
            flat[self.plan.numel :].zero_()

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter, in its shape."""
        sizes = [slot.stop - slot.start for slot in self.plan.slots]  # they lie end to end
        parts = flat.split([*sizes, self.plan.padded - self.plan.numel])
        return [part.view(one.shape) for part, one in zip(parts[:-1], self.parameters, strict=True)]

    def fill(self, values: InitialValues, master: Tensor) -> None:
        """Give the parameters that this rank keeps their initial values, and `master` those of the shard."""
        if self.stage in (1, 2):
            for slot in self.plan.slots:
                for start, stop in _chunks(0, slot.stop - slot.start, self.full):
                    self.full[slot.start + start : slot.start + stop].copy_(values(slot.index, start, stop))
        for index, first, last, place in self.pieces():
            for start, stop in _chunks(first, last, self.shard):
                piece = values(index, start, stop)
                here = slice(place + start - first, place + start - first + piece.numel())
                master[here].copy_(piece)
                self.shard[here].copy_(piece)

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """What the shard holds: (parameter index, first, last + 1, place in the shard)."""
        if self.stage:
            return self.plan.pieces(self.part)
        return [(s.index, 0, s.stop - s.start, s.start) for s in self.plan.slots]

    def gather(self) -> Work:
        """Make the full parameters from all ranks' shards (stages 1 to 3)."""
        if self.stage == 3:
            storage.restore(self.full)
        if self.stage == 0 or self.group.size == 1:
            if self.stage == 3:
                self.full[: self.shard.numel()].copy_(self.shard)
            return Work()
        if not self.in_parts:
            return self.group.all_gather(self.full, self.shard, purpose="parameters")
        self.full.zero_()
        wait_for_device(self.full)
        parts = Parts(self.full, self.group.size)
        received = storage.empty(self.plan.padded, self.full, Category.COMMUNICATION)
        work = self.group.all_gather(received, self.shard, purpose="parameters")

        def finish() -> None:
            work.wait()
            with torch.no_grad():
                parts.take(received)
            wait_for_device(self.full)

        return Work(finish=finish)
