"""A bucket: trained parameters in one flat buffer, which are communicated together.

Elements that a rank retains of a bucket of P parameters (1910.02054 sec. 5; n data-parallel ranks):

| stage | parameters | gradients | optimizer's shard |
|---|---|---|---|
| 0 | P | P | P |
| 1 | P | P | P / n |
| 2 | P | P / n | P / n |
| 3 | P / n | P / n | P / n |

A bucket's gradients are reduced in place, in one message (C_B, sec. 6.2). For stage 0, options add a copy of P
elements, which older libraries reduced instead: torch's DistributedDataParallel permanently, Megatron-LM during the
reduction (`allreduce_gradients` of megatron/model/distributed.py in 2021, `allreduce_params` before).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import SUM, Group, Work
from repro.parallel.zero.flat_parameters import FlatParameters, RankParts, Sharding, Tag
from repro.parallel.zero.partition import BucketPlan
from repro.parallel.zero_r.constant_buffers import reduce_fused
from repro.parallel.zero_r.defragmentation import Arena, Piece

WIDENED_ROWS = 8
"""Number of rows that a CPU converts to fp32 at once in a 16-bit matrix product, to limit the memory of copies."""


def add_product_(sums: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> None:
    """Set `sums` to beta * sums + alpha * a @ b, also fp32 for 16-bit a, b (Megatron's `wgrad_gemm_accum_fp32`)."""
    if sums.dtype == a.dtype or (sums.is_meta and not storage.is_on_processors(sums)):
        torch.addmm(sums, a, b, beta=beta, alpha=alpha, out=sums)
    # torch 2.8 or later has an `addmm` with fp32 output of 16-bit operands.
    elif sums.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(sums, a, b, sums.dtype, beta=beta, alpha=alpha, out=sums)
    else:
        sums.mul_(beta) if beta else sums.zero_()
        for left, right in zip(a.split(WIDENED_ROWS, 1), b.split(WIDENED_ROWS), strict=True):
            torch.addmm(sums, left.to(sums.dtype), right.to(sums.dtype), alpha=alpha, out=sums)


class Bucket(FlatParameters):
    """Parameters that are reduced together, with flat buffers for their values, gradients and master weights."""

    def __init__(
        self, plan: BucketPlan[Tag], parameters: Sequence[Parameter], sharding: Sharding, dtype: torch.dtype
    ):
        super().__init__(plan, parameters, sharding, dtype)
        self.all_reduce_first, self.fused = sharding.all_reduce_first, not sharding.constant_buffers
        self.grad_dtype = sharding.grad_dtype or dtype
        self.pool: Arena | None = None
        """Preallocated memory for full gradients of stages 2 and 3 (M_D, defragmentation); None: torch's allocator."""
        self._piece: Piece | None = None
        self.master = self.shard
        """Parameters that the optimizer updates: fp32 master weights of the shard, or the shard itself if fp32."""
        if dtype.itemsize < 4:
            self.master = storage.zeros(self.shard.numel(), self.shard, Category.OPTIMIZER, torch.float32)
        self._place_gradients()
        self.copy: Tensor | None = None
        """Permanent flat buffer [padded] for copies of gradients to reduce; None: gradients are reduced in place."""
        if not sharding.as_view:
            self.copy = storage.zeros(plan.padded, self.full, Category.COMMUNICATION, self.grad_dtype)
        # Megatron-LM (use_contiguous_buffers_in_ddp) reduced fp32 gradients of 16-bit parameters in place.
        copies = sharding.in_passes and self.grad_dtype == dtype
        self._copied_to_reduce = copies and self.copy is None and self.stage == 0 and not self.fused

    def _place_gradients(self) -> None:
        plan = self.plan
        self.gradients: Tensor | None = None
        """Full gradients of the bucket, flat [padded]; under stages 2 and 3 only until they are reduced."""
        self._views: list[Tensor] = []
        """Views of the parameters' gradients in the bucket's flat gradient buffer; empty while the buffer is freed."""
        if self.stage < 2:
            gradients = storage.zeros(plan.padded, self.full, Category.GRADIENTS, self.grad_dtype)
            self._take(gradients)
            size = plan.shard if self.stage else plan.padded
            self.gradient_shard = gradients[self.part * size : (self.part + 1) * size]
        else:
            self.gradient_shard = storage.zeros(plan.shard, self.full, Category.GRADIENTS, self.grad_dtype)

    @cached_property
    def ranges(self) -> list[tuple[Tag, int, int]]:
        """Return the ranges (tag, start, stop) of the optimizer's shard with parameters of equal properties (tags)."""
        if self.stage:
            return self.plan.ranges(self.part)
        return BucketPlan(self.plan.slots, 1).ranges(0)

    def adopt_writes(self) -> None:
        """Copy parameter values that a user wrote since the last step to the fp32 master weights (stages 0 to 2)."""
        if self.master is not self.shard and self.stage < 3:
            written = self.shard != self.master.to(self.shard.dtype)
            torch.where(written, self.shard.to(self.master.dtype), self.master, out=self.master)

    @property
    def reduces_in_place(self) -> bool:
        """Return whether the gradient reduction of stage 1 needs no memory in addition to the permanent gradients."""
        in_place = self.all_reduce_first or self.group.transport.reduces_in_place
        return self.stage == 1 and in_place and not self.fused and not self.has_part_lists

    def gradient_view(self, slot: int) -> Tensor:
        """Return the memory for the gradient of parameter number `slot`; under stages 2 and 3, allocate the memory."""
        if self.gradients is None:
            if self.pool is not None:
                self._piece = self.pool.take(self.plan.padded)
                gradients = self._piece.tensor
            else:
                gradients = storage.empty(self.plan.padded, self.gradient_shard, Category.GRADIENTS)
            self._clear_padding(gradients)
            self._take(gradients)
        return self._views[slot]

    def _take(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self._views = self._views_of(gradients)

    def reduce(self, *, add: bool) -> Work:
        """Write the bucket's gradients, summed over the dp group, to `gradient_shard`, or add them with `add`."""
        full = self.gradients
        assert full is not None
        copy = self.copy
        if self._copied_to_reduce:
            copy = storage.empty(self.plan.padded, full, Category.COMMUNICATION)
        if copy is not None:
            full = copy.copy_(full)
        is_all_reduced = self.stage == 0 or self.all_reduce_first
        add = add and self.stage >= 2
        output = full if is_all_reduced else self.gradient_shard
        fused = self.fused and self.group.size > 1
        if fused:
            work = reduce_fused(full, output, self.group, add=add)
        elif is_all_reduced:
            work = self.group.all_reduce(full, purpose="gradients")
        else:
            if add:
                output = storage.empty(self.plan.shard, full, Category.COMMUNICATION)
            if self.has_part_lists:
                parts = RankParts(full, self.group.size, flattened=True)
                sent = storage.empty(self.plan.padded, full, Category.COMMUNICATION)
                parts.copy_to(sent)
                full = sent
            work = self.group.reduce_scatter(output, full, purpose="gradients")
        if self.stage < 2 and copy is None:
            return work

        def finish() -> None:
            work.wait()
            if copy is not None:
                self.gradient_shard.copy_(copy)
                return
            if add and not fused:
                self.gradient_shard.add_(output)
            self._free_gradients()

        return Work(finish=finish)

    def unreduce(self) -> None:
        """Prepare reduced gradients for further additions and reductions: divide by n ranks, or clear other shards."""
        gradients = self.gradients
        assert gradients is not None
        if self.stage == 0 or self.all_reduce_first:
            gradients.mul_(1 / self.group.size)
        else:
            size = self.plan.shard
            gradients[: self.part * size].zero_()
            gradients[(self.part + 1) * size :].zero_()

    def _free_gradients(self) -> None:
        """Free the bucket's full gradients after their reduction (stages 2 and 3)."""
        self.gradients, self._views = None, []
        if self.pool is not None and self._piece is not None:
            self.pool.give(self._piece)
            self._piece = None

    def sum_partial_gradients(self, tp: Group) -> None:
        """Sum over `tp` the gradients that each rank has computed for its part of the sequence only (with `sp`)."""
        self._sum_over(tp, lambda tag: tag.partial, "sequence-parallel gradients")

    def sum_tied_gradients(self, ends: Group) -> None:
        """Sum the gradients of tied embeddings over the first and last pipeline stage (Megatron's embedding group)."""
        self._sum_over(ends, lambda tag: tag.tied, "tied gradients")

    def _sum_over(self, group: Group, wanted: Callable[[Tag], bool], purpose: str) -> None:
        runs = [(start, stop) for tag, start, stop in self.ranges if wanted(tag)]
        if not runs or group.size == 1:
            return
        views = [self.gradient_shard[start:stop] for start, stop in runs]
        sizes = [view.numel() for view in views]
        packed = storage.empty(sum(sizes), self.gradient_shard, Category.COMMUNICATION)
        torch.cat(views, out=packed)
        group.all_reduce(packed, SUM, purpose=purpose).wait()
        torch._foreach_copy_(views, list(packed.split(sizes)))
