"""The optimizer step over sharded states: global norm, clipping, overflow check, AdamW, new parameters.

Each rank updates its shard of every bucket (1910.02054 sec. 5.1, P_os); under stage 0 the shard is the
whole bucket.  Norm and overflow are agreed by all ranks in one all-reduce before anything changes, and
nothing in the step waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro import kernels
from repro.config.enums import Category, Phase
from repro.parallel import storage
from repro.parallel.comm import SUM
from repro.parallel.mesh import Mesh
from repro.parallel.precision import LossScaler
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

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, plain: bool = False):
        """`plain`: torch's operators in place of CUDA kernels."""
        self.buckets, self.mesh, self.plain = list(buckets), mesh, plain
        self._counted = self._views(
            lambda tag: not (tag.duplicate and mesh.tp.rank) and not (tag.tied and mesh.pp.rank)
        )
        # Under stage 0 all replicas hold the same gradients; one of them speaks for all.
        replicated = all(bucket.stage == 0 for bucket in self.buckets)
        self._weight = 0.0 if replicated and mesh.dp.rank else 1.0

    def _views(self, wanted: Callable[[Tag], bool]) -> list[Tensor]:
        """The shards' runs whose tag is wanted; neighbouring runs count as one."""
        views = []
        for bucket in self.buckets:
            runs: list[tuple[int, int]] = []
            for tag, start, stop in bucket.ranges():
                if not wanted(tag):
                    continue
                if runs and runs[-1][1] == start:
                    runs[-1] = (runs[-1][0], stop)
                else:
                    runs.append((start, stop))
            views += [bucket.gradient_shard[start:stop] for start, stop in runs]
        return views

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
        if self._counted:
            squares = kernels.norm_squared(self._counted, plain=self.plain)
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
        *,
        plain: bool = False,
    ):
        """`plain`: torch's operators in place of CUDA kernels."""
        self.buckets, self.groups, self.plain = list(buckets), list(groups), plain
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        like = self.buckets[0].master
        self.step_count = torch.zeros((), dtype=torch.float32, device=like.device)
        """Steps taken (skipped ones do not count), 0-dim fp32."""
        self.moments = [
            [storage.zeros(b.master.numel(), b.master, Category.OPTIMIZER, torch.float32) for _ in range(2)]
            for b in self.buckets
        ]
        """First and second moment of every bucket's shard."""
        self._lists = [self._of_group(g) for g in range(len(self.groups))]

    def _of_group(self, group: int) -> tuple[list[Tensor], ...]:
        """Masters, gradients, first and second moments and low-precision copies of one parameter group."""
        lists: tuple[list[Tensor], ...] = ([], [], [], [], [])
        for bucket, (first, second) in zip(self.buckets, self.moments, strict=True):
            mixed = bucket.master is not bucket.shard
            tensors = (bucket.master, bucket.gradient_shard, first, second, bucket.shard)
            start = stop = 0
            for tag, low, high in [*bucket.ranges(), (None, -1, -1)]:
                mine = tag is not None and tag.group == group
                if mine and stop == low:
                    stop = high
                    continue
                if stop > start:
                    for into, tensor in zip(lists, tensors if mixed else tensors[:4], strict=False):
                        into.append(tensor[start:stop])
                start, stop = (low, high) if mine else (0, 0)
        return lists

    def update(self, lr: Tensor, divisor: Tensor | None, skip: Tensor | None) -> None:
        """One AdamW step: gradients are divided by `divisor`; nothing happens where `skip` is 1.

        All 0-dim fp32 tensors.  Gradients are destroyed.
        """
        step = self.step_count + 1
        for group, (masters, gradients, first, second, copies) in zip(self.groups, self._lists, strict=True):
            if masters:
                kernels.adamw_(
                    masters,
                    gradients,
                    first,
                    second,
                    copies,
                    step=step,
                    lr=lr,
                    beta1=self.beta1,
                    beta2=self.beta2,
                    eps=self.eps,
                    weight_decay=group.weight_decay,
                    grad_scale=divisor,
                    found_inf=skip,
                    plain=self.plain,
                )
        self.step_count.copy_(step if skip is None else step - skip)


def divisor_for(norm: Tensor, clip: float, scaler: LossScaler | None) -> Tensor | None:
    """What gradients are divided by: the loss scale, and what brings the global norm down to `clip`."""
    divisor = None
    if clip > 0:
        divisor = ((norm + 1e-6) / clip).clamp(min=1.0)
    if scaler is not None:
        divisor = scaler.scale if divisor is None else divisor * scaler.scale
    return divisor
