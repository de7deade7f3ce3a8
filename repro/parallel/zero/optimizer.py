"""ZeRO stages 1 and 2, P_os and P_os+g: optimizer step over sharded states, and gather of the updated parameters.

Each rank updates its shard of every bucket (1910.02054 sec. 5.1). Under stage 0 the shard is the full bucket. All
ranks agree on norm and overflow in one all-reduce before any state changes, and no operation waits for the host.

`OperatorSet.in_passes` reproduces software until 2021, which converts, unscales and clips gradients, updates states and
copies masters in separate passes over memory (Megatron-LM: fp16/fp16.py of 2019, megatron/optimizer/optimizer.py and
clip_grads.py of 2021). With the norm, the passes move 60 bytes per parameter, and the fused kernel 30 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repro import kernels
from repro.config.enums import Category, OperatorSet, Phase
from repro.parallel import storage
from repro.parallel.comm import SUM, Work
from repro.parallel.mesh import Mesh
from repro.parallel.zero.flat_buffer import Bucket
from repro.parallel.zero.flat_parameters import Tag
from repro.parallel.zero.partition import GatherUnit, parameters_by_unit


@dataclass(frozen=True)
class Norms:
    """Gradient norm, loss and overflow of one training step, equal on all ranks, as 0-dim fp32 tensors."""

    gradient: Tensor
    """Global gradient norm before clipping (unscaled)."""
    loss: Tensor
    """Mean loss over all replicas."""
    overflow: Tensor
    """1 if a gradient was not finite and the step was skipped, else 0."""


class GradientShards:
    """Reduced gradients of the parameter shards that this rank updates, and the global norm of all gradients."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, operators: OperatorSet = OperatorSet.FUSED):
        self.buckets, self.mesh, self.operators = list(buckets), mesh, operators
        self.shards = [bucket.gradient_shard for bucket in self.buckets]
        """Gradient shard of each bucket; under `in_passes` (separate memory passes), temporarily an fp32 copy."""
        self._counted = self._runs(
            lambda tag: not (tag.duplicate and mesh.tp.rank) and not (tag.tied and mesh.pp.rank)
        )
        # Under stage 0 all replicas have equal gradients, so only rank 0 adds its part to the gradient norm.
        replicated = all(bucket.stage == 0 for bucket in self.buckets)
        self._weight = 0.0 if replicated and mesh.dp.rank else 1.0

    def _runs(self, wanted: Callable[[Tag], bool]) -> list[list[tuple[int, int]]]:
        """Return each shard's ranges (start, stop) of parameters with `wanted` properties, merged if adjacent."""
        found = []
        for bucket in self.buckets:
            runs: list[tuple[int, int]] = []
            for tag, start, stop in bucket.ranges:
                if not wanted(tag):
                    continue
                if runs and runs[-1][1] == start:
                    runs[-1] = (runs[-1][0], stop)
                else:
                    runs.append((start, stop))
            found.append(runs)
        return found

    def release(self) -> None:
        """Free the fp32 copies of the gradients after the optimizer step."""
        self.shards = [bucket.gradient_shard for bucket in self.buckets]

    def _widen(self, scale: Tensor | None) -> None:
        """Convert the gradients to fp32, and divide them by the loss scale in a second pass over memory."""
        self.shards = [gradient.float() for gradient in self.shards]
        if scale is not None:
            torch._foreach_mul_(self.shards, 1.0 / scale)

    def agree(
        self, loss: Tensor, scale: Tensor | None, observe: Callable[[Phase], None] = lambda phase: None
    ) -> Norms:
        """Return global gradient norm, mean loss and overflow of a step, from one all-reduce of 8 bytes over all ranks.

        `loss`: mean loss of this replica, 0 on all stages but the last. `scale`: loss scale of the gradients. `observe`
        is called with `idle` before each wait for other pipeline stages, and with `optimizer` after the wait.
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
            for gradient, runs in zip(self.shards, self._counted, strict=True)
            for start, stop in runs
        ]
        if counted:
            squares = kernels.norm_squared(counted, plain=self.operators.plain)
        else:  # This rank's gradient shards are padding, or gradients that other ranks add to the norm.
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
    """AdamW of this rank's shards, with the arithmetic of `torch.optim.AdamW`."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        decays: Sequence[float],
        beta1: float,
        beta2: float,
        eps: float,
        operators: OperatorSet = OperatorSet.FUSED,
    ):
        """Create AdamW's moments. `decays`: weight decay of each group. `operators`: fused or separate operators."""
        self.buckets, self.decays, self.operators = list(buckets), list(decays), operators
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        like = self.buckets[0].master
        self.step_count = torch.zeros((), dtype=torch.float32, device=like.device)
        """Number of optimizer steps, without steps skipped for an overflow, 0-dim fp32."""
        self.moments = [
            [storage.zeros(b.master.numel(), b.master, Category.OPTIMIZER, torch.float32) for _ in range(2)]
            for b in self.buckets
        ]
        """First and second moment of AdamW for this rank's shard of every bucket, flat fp32."""
        self._parts = [self._parts_of(bucket) for bucket in self.buckets]
        mixed = [bucket for bucket in self.buckets if bucket.master is not bucket.shard]
        self._masters = self._by_group([bucket.master for bucket in self.buckets])
        self._first, self._second = (self._by_group(moments) for moments in zip(*self.moments, strict=True))
        self._copies = self._by_group([bucket.shard for bucket in mixed])

    @staticmethod
    def _parts_of(bucket: Bucket) -> list[tuple[int | None, int]]:
        """Return the parts of a bucket's shard in order: (parameter group, number of elements); None for padding."""
        parts: list[tuple[int | None, int]] = []
        end = 0
        for tag, start, stop in bucket.ranges:
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
        """Split flat tensors, one per bucket, by the optimizer's parameter groups; return the views of each group."""
        found: list[list[Tensor]] = [[] for _ in self.decays]
        for tensor, parts in zip(tensors, self._parts, strict=bool(tensors)):
            pieces = tensor.split([count for _, count in parts]) if len(parts) > 1 else [tensor]
            for (group, _), piece in zip(parts, pieces, strict=True):
                if group is not None:
                    found[group].append(piece)
        return found

    def update(
        self, gradients: Sequence[Tensor], lr: Tensor, divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        """Run one AdamW step with the gradients divided by `divisor`; change no state if `skip` is 1.

        `gradients`: flat gradient shard of each bucket, which the step overwrites. Other arguments: 0-dim fp32.
        """
        in_passes = self.operators.in_passes
        if in_passes and divisor is not None:
            torch._foreach_mul_(list(gradients), 1.0 / divisor)
            divisor = None
        step = self.step_count + 1
        given = self._by_group(gradients)
        for g, decay in enumerate(self.decays):
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
                weight_decay=decay,
                grad_scale=divisor,
                found_inf=skip,
                plain=self.operators.plain,
            )
            if in_passes and self._copies[g]:
                torch._foreach_copy_(self._copies[g], self._masters[g])
        self.step_count.copy_(step if skip is None else step - skip)


def divisor_for(norm: Tensor, clip: float, scale: Tensor | None) -> Tensor | None:
    """Return the divisor of the gradients for unscaling and clipping: loss scale times max(1, norm / `clip`)."""
    if clip <= 0:
        return scale
    divisor = ((norm + 1e-6) / clip).clamp(min=1.0)
    return divisor if scale is None else divisor * scale


class LossScaler:
    """Dynamic loss scale of fp16 training, as 0-dim fp32 tensors.

    The rules are those of Megatron-LM and DeepSpeed in 2019-2021. The scale starts at 2^16. An overflow on any rank
    makes all ranks skip the step. The scale halves after `hysteresis` overflows, and doubles after `window` steps
    without overflow. All state is on the device, so no decision waits for the host.
    """

    def __init__(self, initial: float, window: int, hysteresis: int, device: torch.device):
        def scalar(value: float) -> Tensor:
            return torch.full((), value, dtype=torch.float32, device=device)

        self.scale, self.window, self.hysteresis = scalar(initial), window, hysteresis
        self.good_steps, self.tolerance = scalar(0.0), scalar(float(hysteresis))

    def update(self, overflow: Tensor) -> None:
        """Update the loss scale after a step; `overflow` is 1 or 0 (0-dim fp32), equal on all ranks."""
        self.tolerance.sub_(overflow)
        self.good_steps.add_(1).mul_(1 - overflow)
        halve = (overflow > 0) & (self.tolerance <= 0)
        double = self.good_steps >= self.window
        self.scale.mul_(torch.where(halve, 0.5, 1.0) * torch.where(double, 2.0, 1.0)).clamp_(min=1.0)
        self.good_steps.mul_(torch.where(double, 0.0, 1.0))
        self.tolerance.copy_(torch.where(double, float(self.hysteresis), self.tolerance))


class UpdatedParameterGather:
    """Gather of the updated parameters (stages 1 and 2) while the next forward pass runs.

    After the optimizer step all buckets are gathered, the first layers first. A module call waits only for the buckets
    with parameters of the module and its children, since some modules read a child's parameters without calling the
    child. Code that reads parameters outside module calls must call `wait`.
    """

    def __init__(self, module: nn.Module, units: Sequence[GatherUnit], buckets: Sequence[Bucket]):
        self.buckets = list(buckets)[::-1]
        self._works: dict[int, Work] = {}
        bucket_of = {id(p): b for b, bucket in enumerate(self.buckets) for p in bucket.parameters}
        modules = dict(module.named_modules())
        self._handles = []
        for unit, parameters in zip(units, parameters_by_unit(module, units), strict=True):
            of_unit = {id(p) for p in parameters if id(p) in bucket_of}
            for use in unit.uses:
                used = of_unit.intersection(map(id, modules[use.module].parameters()))
                needed = sorted({bucket_of[key] for key in used})
                self._handles.append(modules[use.module].register_forward_pre_hook(self._before(needed)))

    def start(self) -> None:
        """Start to all-gather updated parameters [P] of every bucket from shards [P/n], the first layers first."""
        with torch.no_grad():
            self._works = {b: bucket.gather() for b, bucket in enumerate(self.buckets)}

    def wait(self) -> None:
        """Wait until all updated parameters are gathered, before code outside a forward pass reads them."""
        self._await(list(self._works))

    def remove(self) -> None:
        """Remove the hooks that wait for gathered parameters from the module."""
        for handle in self._handles:
            handle.remove()

    def _before(self, needed: list[int]) -> Callable[..., None]:
        def await_parameters(module: nn.Module, inputs: Any) -> None:
            self._await(needed)

        return await_parameters

    def _await(self, buckets: Sequence[int]) -> None:
        for b in buckets:
            work = self._works.pop(b, None)
            if work is not None:
                work.wait()
