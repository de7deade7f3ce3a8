"""Flat buffer of frozen or trained parameters, of which a rank retains only its shard under ZeRO stage 3.

With `by_parameter`, stage 3 gathers each parameter separately, as DeepSpeed 0.3.13 did in March 2021
(`deepspeed/runtime/zero/partition_parameters.py`, `stage3.py`). Every collective then has a list of one tensor per
rank, which are copied from or to NCCL's buffer, and the host synchronizes with the device before and after a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config import Layout
from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group, Work
from repro.parallel.zero.partition import BucketPlan

InitialValues = Callable[[int, int, int], Tensor]
"""Function (parameter index, start, stop) -> initial fp32 values, flat, of the (tp-local) elements start..stop."""

INITIALISED_ELEMENTS = 1 << 22
"""Maximum number of parameter elements that are initialised at once, which limits temporary memory."""
PERSISTENCE_THRESHOLD_ELEMENTS = 100_000
"""Minimum size in elements of parameters that stage 3 frees after use (DeepSpeed's `param_persistence_threshold`)."""
MAX_REUSE_DISTANCE_ELEMENTS = 1_000_000_000
"""Number of elements of other parameters, used between two uses of a parameter, from which on stage 3 frees the
parameter in between (DeepSpeed's `max_reuse_distance`)."""


@dataclass(frozen=True)
class Tag:
    """Properties of a parameter that decide how the optimizer and the gradient norm process its elements in a shard."""

    group: int
    """Index of the optimizer's parameter group that contains the parameter."""
    duplicate: bool = False
    """Whether all tp ranks hold equal values of the parameter, so that the global gradient norm counts them once."""
    tied: bool = False
    """Whether the first and the last pipeline stage both hold the parameter and sum its gradients before the step."""
    partial: bool = False
    """Whether each tp rank computes a parameter's gradient from its part of the sequence only, for a sum over tp."""


@dataclass(frozen=True)
class Sharding:
    """Settings by which ZeRO distributes parameters and gradients over the data-parallel group."""

    stage: int
    group: Group
    device: torch.device
    bucket_bytes: int
    all_reduce_first: bool
    """Whether stage 1 all-reduces gradients instead of a reduce-scatter, as DeepSpeed did in February 2020."""
    dtype: torch.dtype | None
    """Data type to which parameters are converted; None: each parameter retains its data type."""
    constant_buffers: bool = True
    """Whether gradients are reduced in buckets of `bucket_bytes` (C_B of ZeRO-R), else in one fp32 bucket."""
    contiguous: bool = False
    """Whether full gradients of stages 2 and 3 use memory that is allocated once (M_D of ZeRO-R)."""
    overlap: bool = True
    """Whether the communication of gradients and parameters overlaps with computation."""
    as_view: bool = True
    """Whether gradients are views of their buckets; otherwise (stage 0) they are copied to a second buffer."""
    in_passes: bool = False
    """Whether separate passes over memory add gradients and copy them for the reduction, as in software until 2021."""
    by_parameter: bool = False
    """Whether stage 3 gathers each parameter separately, without prefetch, as DeepSpeed did in March 2021."""
    grad_dtype: torch.dtype | None = None
    """Data type of accumulated and reduced gradients; None: the data type of the parameters."""
    fused_accumulation: bool = False
    """Whether matrix products of 16-bit operands accumulate weight gradients directly in the data type `grad_dtype`."""
    gather_overlap: bool = True
    """Whether updated parameters (stages 1 and 2) are gathered during the next forward pass."""

    @property
    def adds_in_products(self) -> bool:
        """Return whether the matrix product of a weight gradient adds its result directly to the gradient bucket."""
        return not self.in_passes and (self.grad_dtype is None or self.fused_accumulation)

    @staticmethod
    def from_layout(
        layout: Layout, group: Group, device: torch.device, dtype: torch.dtype | None
    ) -> Sharding:
        """Return the ZeRO sharding that the layout specifies for parameters on `device`."""
        return Sharding(
            stage=layout.zero,
            group=group,
            device=device,
            bucket_bytes=layout.bucket_bytes,
            all_reduce_first=layout.zero1_reduce == "all-reduce",
            dtype=dtype,
            constant_buffers=layout.cb,
            contiguous=layout.md,
            overlap=layout.overlap,
            as_view=layout.gradient_as_bucket_view,
            in_passes=layout.kernels.in_passes,
            by_parameter=layout.zero3_gather == "parameter",
            grad_dtype=torch.float32 if layout.grad_dtype == "fp32" else None,
            fused_accumulation=layout.kernels.fuses_gradient_accumulation,
            gather_overlap=layout.overlap and layout.gather_overlap,
        )


def _chunks(first: int, last: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, stop) of limited size that cover `first` to `last`; on `meta` only the first range."""
    for start in range(first, last, INITIALISED_ELEMENTS):
        yield start, min(start + INITIALISED_ELEMENTS, last)
        if like.is_meta:
            return


class FlatParameters:
    """Flat buffer `full` of parameters, each of which is a view of the buffer; stage 3 frees it between uses."""

    def __init__(
        self, plan: BucketPlan[Tag], parameters: Sequence[Parameter], sharding: Sharding, dtype: torch.dtype
    ):
        group, stage = sharding.group, sharding.stage
        self.plan, self.parameters, self.stage, self.group = plan, list(parameters), stage, group
        self.has_part_lists = sharding.by_parameter and group.size > 1
        """Whether collectives copy a list of one tensor per rank (DeepSpeed's gather by parameter)."""
        self.is_persistent = sharding.by_parameter and is_below_persistence_threshold(self.parameters[0])
        """Whether stage 3 retains the gathered parameters until the optimizer step, because they are small."""
        self.part = group.rank if stage >= 1 else 0
        """Index of the shard that this rank's optimizer updates and that the rank retains under stage 3."""
        like = torch.empty(0, dtype=dtype, device=sharding.device)
        self.full = storage.empty(plan.padded, like, Category.PARAMETERS)
        """Full parameters of the flat buffer with padding; stage 3 frees their memory between uses."""
        if stage == 3:
            self.shard = storage.zeros(plan.shard, like, Category.PARAMETERS)
        else:
            self._clear_padding(self.full)
            size = plan.shard if stage else plan.padded
            self.shard = self.full[self.part * size : (self.part + 1) * size]
        for parameter, view in zip(self.parameters, self._views_of(self.full), strict=True):
            parameter.data = view
            parameter.grad = None  # A gradient that exists already would be added to that of the first step.
        if stage == 3:
            storage.release(self.full)

    def _clear_padding(self, flat: Tensor) -> None:
        if self.plan.padded > self.plan.numel:
            flat[self.plan.numel :].zero_()

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Return a view of flat buffer `flat` for each parameter, in the parameter's shape."""
        sizes = [slot.stop - slot.start for slot in self.plan.slots]
        with storage.unobserved(flat.device):
            parts = flat.split([*sizes, self.plan.padded - self.plan.numel])
            return [part.view(one.shape) for part, one in zip(parts[:-1], self.parameters, strict=True)]

    def fill(self, values: InitialValues, master: Tensor) -> None:
        """Write the initial values of this rank's parameters, and those of its shard to the master weights `master`."""
        if self.stage in (1, 2):
            for slot in self.plan.slots:
                for start, stop in _chunks(0, slot.stop - slot.start, self.full):
                    place = slice(slot.start + start, slot.start + stop)

                    def write(index: int = slot.index, start: int = start, place: slice = place) -> None:
                        self.full[place].copy_(values(index, start, start + place.stop - place.start))

                    storage.call_once(self.full, ("values", self.full.dtype, stop - start), write)
        kinds = tuple((one.dtype, storage.category_of(one.untyped_storage())) for one in (master, self.shard))
        for index, first, last, offset in self.pieces():
            for start, stop in _chunks(first, last, self.shard):
                piece = values(index, start, stop)
                place = slice(offset + start - first, offset + stop - first)

                def copy(piece: Tensor = piece, place: slice = place) -> None:
                    master[place].copy_(piece)
                    self.shard[place].copy_(piece)

                storage.call_once(self.full, ("piece", stop - start, *kinds), copy)

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """Return the shard's parameters as (parameter index, first element, last element + 1, offset in the shard)."""
        if self.stage:
            return self.plan.pieces(self.part)
        return [(s.index, 0, s.stop - s.start, s.start) for s in self.plan.slots]

    def gather(self) -> Work:
        """All-gather the full parameters from the shards of all data-parallel ranks (stages 1 to 3)."""
        if self.stage == 3:
            storage.restore(self.full)
        if self.stage == 0 or self.group.size == 1:
            if self.stage == 3:
                self.full[: self.shard.numel()].copy_(self.shard)
            return Work()
        if not self.has_part_lists:
            return self.group.all_gather(self.full, self.shard, purpose="parameters")
        self.full.zero_()
        synchronize_host(self.full)
        parts = RankParts(self.full, self.group.size)
        received = storage.empty(self.plan.padded, self.full, Category.COMMUNICATION)
        work = self.group.all_gather(received, self.shard, purpose="parameters")

        def finish() -> None:
            work.wait()
            with torch.no_grad():
                parts.copy_from(received)
            synchronize_host(self.full)

        return Work(finish=finish)


def is_below_persistence_threshold(parameter: Parameter) -> bool:
    """Return whether the parameter is so small that stage 3 with separate gathers retains it after its use."""
    return parameter.numel() < PERSISTENCE_THRESHOLD_ELEMENTS


def exceed_reuse_distance(elements: Sequence[int]) -> list[bool]:
    """Return whether each parameter of a block is freed between the block's recomputation and its backward pass.

    `elements`: sizes of the parameters in the order of use. Between these two uses of a parameter, all later parameters
    of the block are used twice: forward and backward.
    """
    return [2 * sum(elements[i + 1 :]) >= MAX_REUSE_DISTANCE_ELEMENTS for i in range(len(elements))]


class RankParts:
    """Equal parts of a flat tensor, one for each rank, as views that are copied one by one. On `meta` no views are
    created, and the simulation that observes the tensor is notified of the number of views."""

    def __init__(self, flat: Tensor, count: int, *, flattened: bool = False):
        """Create one view of `flat` per rank. `flattened`: create each from a view `flat.view(-1)`, as libraries do."""
        self._flat, self._count = flat, count
        self._views: list[Tensor] = []
        if flat.is_meta:
            if (observer := storage.observer_of(flat)) is not None:
                observer.listed(flat, count * (1 + flattened))
            return
        size = flat.numel() // count
        for part in range(count):
            source = flat.view(-1) if flattened else flat
            self._views.append(source.narrow(0, part * size, size))

    def copy_from(self, source: Tensor) -> None:
        """Copy flat `source` to the ranks' parts of the tensor, one part at a time."""
        self._copy(self._views, source)

    def copy_to(self, target: Tensor) -> None:
        """Copy the ranks' parts of the tensor to flat `target`, one part at a time."""
        self._copy(target, self._views)

    def _copy(self, target: Tensor | list[Tensor], source: Tensor | list[Tensor]) -> None:
        if self._flat.is_meta:
            if (observer := storage.observer_of(self._flat)) is not None:
                observer.copied(self._flat, self._count)
            return
        for target_part, source_part in zip(self._chunks(target), self._chunks(source), strict=True):
            target_part.copy_(source_part)

    def _chunks(self, tensor: Tensor | list[Tensor]) -> Iterable[Tensor]:
        return tensor.chunk(self._count) if isinstance(tensor, Tensor) else tensor


def synchronize_host(like: Tensor) -> None:
    """Block the host until the device of tensor `like` has finished all launched operations."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    elif like.is_meta and (observer := storage.observer_of(like)) is not None:
        observer.waited()
