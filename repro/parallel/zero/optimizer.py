"""The optimizer step over sharded states: global norm, clipping, overflow check, AdamW, new parameters.

Each rank updates its shard of every bucket (1910.02054 sec. 5.1, P_os); under stage 0 the shard is the
whole bucket.  Norm and overflow are agreed by all ranks in one all-reduce before anything changes, and
nothing in the step waits for the host.

Software until 2021 updates in passes over memory, each a pass of its own: gradients are widened to fp32, unscaled, and
clipped, masters and moments updated, and masters copied to 16 bits (Megatron-LM: fp16/fp16.py of 2019,
megatron/optimizer/optimizer.py and clip_grads.py of 2021).  With the norm these are 60 bytes a parameter where one
kernel needs 30, and 4 more are held meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro import kernels
from repro.config.enums import Category, Phase
from repro.config.operator_set import OperatorSet
from repro.parallel import storage
from repro.parallel.comm import SUM
from repro.parallel.mesh import Mesh
from repro.parallel.zero.flat_buffer import Bucket
from repro.parallel.zero.flat_parameters import Tag


@dataclass(frozen=True)
class AdamGroup:
    """Settings of one parameter group."""

    weight_decay: float


@dataclass(frozen=True)
class Norms:
    """What one step agreed on; 0-dim fp32 tensors, equal on all ranks."""

    gradient: Tensor
    """Global gradient norm before clipping (unscaled)."""
    loss: Tensor
    """Mean loss over all replicas."""
    overflow: Tensor
    """1 if a gradient was not finite and the step was skipped, else 0."""


class GradientShards:
    """The reduced gradients that this rank's optimizer sees, with their global norm."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, operators: OperatorSet = OperatorSet.FUSED):
        self.buckets, self.mesh, self.operators = list(buckets), mesh, operators
        self.seen = [bucket.gradient_shard for bucket in self.buckets]
        """As the optimizer sees them, by bucket.  In passes: fp32 and unscaled from `agree` to `drop`."""
        self._counted = self._runs(
            lambda tag: not (tag.duplicate and mesh.tp.rank) and not (tag.tied and mesh.pp.rank)
        )
        # Under stage 0 all replicas hold the same gradients; one of them speaks for all.
        replicated = all(bucket.stage == 0 for bucket in self.buckets)
        self._weight = 0.0 if replicated and mesh.dp.rank else 1.0

    def _runs(self, wanted: Callable[[Tag], bool]) -> list[list[tuple[int, int]]]:
        """First and last element of the shards' runs whose tag is wanted, by bucket; neighbours count as one."""
        found = []
        for bucket in self.buckets:
            runs: list[tuple[int, int]] = []
            for tag, start, stop in bucket.ranges():
                if not wanted(tag):
                    continue
                if runs and runs[-1][1] == start:
                    runs[-1] = (runs[-1][0], stop)
                else:
                    runs.append((start, stop))
            found.append(runs)
        return found

    def drop(self) -> None:
        """The update is done: free what only it needs."""
        self.seen = [bucket.gradient_shard for bucket in self.buckets]

    def _widen(self, scale: Tensor | None) -> None:
        """Make what is seen fp32, and take the loss scale off it: two passes."""
        self.seen = [gradient.float() for gradient in self.seen]
        if scale is not None:
            torch._foreach_mul_(self.seen, 1.0 / scale)

    def agree(
        self, loss: Tensor, scale: Tensor | None, observe: Callable[[Phase], None] = lambda phase: None
    ) -> Norms:
        """Global norm, mean loss and overflow, in one all-reduce of 8 bytes over all ranks.

        `loss` is this replica's mean loss, 0 on all but its last stage; `scale` the loss scale the
        gradients still carry.  `observe` is called with `idle` where there is nothing to do but wait for
        stages whose last backward comes later, and with `optimizer` after.
        """
        for bucket in self.buckets:
            bucket.sum_partial_gradients(self.mesh.tp)
        observe(Phase.IDLE)
        for bucket in self.buckets:
            bucket.sum_tied_gradients(self.mesh.embedding)
        observe(Phase.OPTIMIZER)
        if self.operators.in_passes:
            self._widen(scale)
            scale = None
        counted = [
            gradient[start:stop]
            for gradient, runs in zip(self.seen, self._counted, strict=True)
            for start, stop in runs
        ]
        if counted:
            squares = kernels.norm_squared(counted, plain=self.operators.plain)
        else:  # all that this rank's shards hold is padding, or counted by another tp rank
            squares = torch.zeros((), dtype=torch.float32, device=loss.device)
        replicas = self.mesh.world.size // self.mesh.pp.size
        shared = torch.stack((squares * self._weight, loss.float() / replicas))
        observe(Phase.IDLE)
        self.mesh.world.all_reduce(shared, SUM, purpose="norm").wait()
        observe(Phase.OPTIMIZER)
        norm = shared[0].sqrt()
        if scale is not None:
            norm = norm / scale
        overflow = 1.0 - torch.isfinite(shared[0]).float()
        return Norms(norm, shared[1], overflow)


class ShardedAdamW:
    """AdamW whose states live on this rank's shards; `torch.optim.AdamW`'s arithmetic."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Sequence[AdamGroup],
        beta1: float,
        beta2: float,
        eps: float,
        operators: OperatorSet = OperatorSet.FUSED,
    ):
        self.buckets, self.groups, self.operators = list(buckets), list(groups), operators
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        like = self.buckets[0].master
        self.step_count = torch.zeros((), dtype=torch.float32, device=like.device)
        """Steps taken (skipped ones do not count), 0-dim fp32."""
        self.moments = [
            [storage.zeros(b.master.numel(), b.master, Category.OPTIMIZER, torch.float32) for _ in range(2)]
            for b in self.buckets
        ]
        """First and second moment of every bucket's shard."""
        self._parts = [self._parts_of(bucket) for bucket in self.buckets]
        mixed = [bucket for bucket in self.buckets if bucket.master is not bucket.shard]
        self._masters = self._by_group([bucket.master for bucket in self.buckets])
        self._first, self._second = (self._by_group(moments) for moments in zip(*self.moments, strict=True))
        self._copies = self._by_group([bucket.shard for bucket in mixed])

    @staticmethod
    def _parts_of(bucket: Bucket) -> list[tuple[int | None, int]]:
        """The parts of a bucket's shard: parameter group, None for padding, and elements."""
        parts: list[tuple[int | None, int]] = []
        end = 0
        for tag, start, stop in bucket.ranges():
            if start > end:
                parts.append((None, start - end))
            if parts and parts[-1][0] == tag.group:
                parts[-1] = (tag.group, parts[-1][1] + stop - start)
            else:
                parts.append((tag.group, stop - start))
            end = stop
        padding = bucket.master.numel() - end
        return [*parts, (None, padding)] if padding else parts

    def _by_group(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Parts of one tensor of every bucket, by parameter group; of none, none."""
        found: list[list[Tensor]] = [[] for _ in self.groups]
        for tensor, parts in zip(tensors, self._parts, strict=bool(tensors)):
            pieces = tensor.split([count for _, count in parts]) if len(parts) > 1 else [tensor]
            for (group, _), piece in zip(parts, pieces, strict=True):
                if group is not None:
                    found[group].append(piece)
        return found

    def update(
        self, gradients: Sequence[Tensor], lr: Tensor, divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        """One AdamW step: gradients are divided by `divisor`; nothing happens where `skip` is 1.

        `gradients`: of every bucket's shard; they are destroyed.  The others: 0-dim fp32 tensors.
        """
        in_passes = self.operators.in_passes
        if in_passes and divisor is not None:
            torch._foreach_mul_(list(gradients), 1.0 / divisor)
            divisor = None
        step = self.step_count + 1
        given = self._by_group(gradients)
        for g, group in enumerate(self.groups):
            if not self._masters[g]:
                continue
            kernels.adamw_(
                self._masters[g],
                given[g],
                self._first[g],
                self._second[g],
                [] if in_passes else self._copies[g],
                step=step,
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.eps,
                weight_decay=group.weight_decay,
                grad_scale=divisor,
                found_inf=skip,
                plain=self.operators.plain,
            )
            if in_passes and self._copies[g]:
                torch._foreach_copy_(self._copies[g], self._masters[g])
        self.step_count.copy_(step if skip is None else step - skip)


def divisor_for(norm: Tensor, clip: float, scale: Tensor | None) -> Tensor | None:
    """What gradients are divided by: the loss scale that they carry, and what brings the global norm down to `clip`."""
    if clip <= 0:
        return scale
    divisor = ((norm + 1e-6) / clip).clamp(min=1.0)
    return divisor if scale is None else divisor * scale
