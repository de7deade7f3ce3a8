"""The stock training loop of a module that is spread: what happens at its forward and backward passes and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from repro import kernels
from repro.parallel.comm import SUM, Group
from repro.parallel.zero.backward_schedule import tensors_in
from repro.parallel.zero.partition import GatherUnit, parameters_by_unit
from repro.wrap.gradients import UsersGradients
from repro.wrap.loss_scaling import LossScaling
from repro.wrap.module_states import WrappedModule
from repro.wrap.optimizer_states import OptimizerStates, Shard
from repro.wrap.refusals import Unchanged
from repro.wrap.step_agreement import StepAgreement


class StockLoop:
    """Ties a sharded module to the stock loop: hooks on forward, backward and `optimizer.step`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        sharded: WrappedModule,
        units: Sequence[GatherUnit],
        accumulation: int,
        clip: float,
        host: Group,
    ):
        """`host`: the ranks, for numbers that the host must know at once."""
        self.sharded, self.accumulation, self.clip = sharded, accumulation, clip
        self.micro_batch = 0
        self._forward = False
        """Whether a forward pass waits for its backward pass."""
        self._recording = False
        """Whether the forward pass that runs, or ran last, was made with gradients."""
        self._queued = False
        """Whether a backward pass runs."""
        self._looked = False
        """Whether one that only looks went through the forward passes that wait for theirs."""
        self._uses: dict[int, tuple[int, bool]] = {}
        """How often each block was used since the last backward pass, and whether under a reentrant checkpoint."""
        self._unsynchronized = False
        """Whether `module.no_sync()` says that this backward pass is not the step's last."""
        self._shards = self._cut(optimizer)
        self.states = OptimizerStates(optimizer, sharded, self._shards, host)
        self._share_out(optimizer)
        pieces = {shard.index: shard.gradient for shard in self._shards if shard.gradient.numel()}
        self.gradients = UsersGradients(sharded, pieces)
        others = sharded.sharding.group if sharded.sharding.stage else None
        self._scaling = LossScaling(self._shards, others, self.gradients.norms.before_change)
        self._unchanged = Unchanged(module, sharded, optimizer)
        self.agreement = StepAgreement(module, sharded, host)
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward)
        sharded.reducer.arriving = self._on_gradient_of_a_look
        if sharded.reducer.by_arrival:
            self._watch_repeats(module, units)
        sharded.guard(units)
        module.no_sync = self.no_sync  # type: ignore[assignment]
        for owner in (module, optimizer):
            vars(owner)["zero_grad"] = self._then_restart(owner.zero_grad)
        # A GradScaler divides gradients before the step, in which they are clipped, and not in a fused optimizer.
        vars(optimizer)["_step_supports_amp_scaling"] = False
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _cut(self, optimizer: torch.optim.Optimizer) -> list[Shard]:
        """This rank's shards, in the order in which the optimizer has the parameters."""
        position = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        shards = []
        for bucket in self.sharded.buckets:
            for index, first, last, start in bucket.pieces():
                here = slice(start, start + last - first)
                parameter = Parameter(bucket.master[here])
                shards.append(Shard(index, first, last, parameter, bucket.gradient_shard[here]))
        if not shards:  # all that this rank has is padding: its optimizer gets an empty piece, and goes along
            bucket = self.sharded.buckets[0]
            empty = Parameter(bucket.master[:0])
            shards.append(Shard(bucket.plan.slots[0].index, 0, 0, empty, bucket.gradient_shard[:0]))
        return sorted(shards, key=lambda shard: position[id(self.sharded.parameters[shard.index])])

    def _share_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this rank's shards instead of the module's parameters."""
        for group in optimizer.param_groups:
            mine = {id(p) for p in group["params"]}
            group["params"] = [
                s.parameter for s in self._shards if id(self.sharded.parameters[s.index]) in mine
            ]

    def _watch_repeats(self, module: nn.Module, units: Sequence[GatherUnit]) -> None:
        """Stages 0 to 2: keep the buckets of a block that reentrant checkpointing runs twice in a pass.

        Its parameters get a gradient for each time, and the first must not be taken for the whole.
        """
        bucket_of = {id(p): bucket for bucket in self.sharded.buckets for p in bucket.parameters}
        names = dict(module.named_modules())

        def watch(parameters: list[Parameter]) -> Callable[..., None]:
            buckets = [bucket_of[id(p)] for p in parameters if id(p) in bucket_of]

            def count(block: nn.Module, inputs: Any) -> None:
                if not self._recording or self._queued:  # evaluation, or recomputation
                    return
                times, checkpointed = self._uses.get(id(block), (0, False))
                checkpointed |= not torch.is_grad_enabled()
                self._uses[id(block)] = times + 1, checkpointed
                if times and checkpointed:
                    for bucket in buckets:
                        self.sharded.reducer.hold(bucket)

            return count

        for unit, parameters in zip(units, parameters_by_unit(module, units), strict=True):
            for use in unit.uses:
                names[use.module].register_forward_pre_hook(watch(parameters))

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._queued and torch._C._current_graph_task_id() != -1:
            return  # recomputation of the whole module
        self._queued = False  # a backward pass that failed has not taken it back
        self._recording = torch.is_grad_enabled()
        if not self._recording:
            if self.sharded.gatherer is not None:
                self.sharded.gatherer.begin_forward()
            return
        if not torch.compiler.is_compiling():  # it would take the parameters into its graph
            self._unchanged.check()
        self._forward = True
        self._hide_gradients()
        # Under stages 0 and 1 the last micro-batch brings the reduction; `_before_step` does where none was the last.
        passes = self.micro_batch + 2 if self._unsynchronized else self.accumulation
        self.sharded.begin(self.micro_batch, passes)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.sharded.gatherer is not None and not self._queued:
            self.sharded.gatherer.end_forward()
        for tensor in tensors_in(output, attributes=True):
            if tensor.requires_grad:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor | None) -> None:
        if not self._queued:
            if self.sharded.grad_only_backward.is_running():
                self._looked = True
                return
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "backward(create_graph=True): gradients in buckets have no graph; for a penalty differentiate "
                    "torch.autograd.grad(..., create_graph=True) by the module's inputs"
                )
            if not self._forward:
                raise RuntimeError(
                    "a second backward pass after one forward pass: sum the losses for one backward pass, "
                    "or run each forward pass right before its backward pass"
                )
            self._queued = True
            # What torch's own DDP and FSDP use to learn that a backward pass is over.
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]

    def _on_gradient_of_a_look(self) -> None:
        """What a look has computed may be all that the loss is of: then the module's output has no gradient."""
        if self._looked and not self._queued:
            self._on_backward(None)

    def _after_backward(self) -> None:
        self._queued = self._forward = self._looked = False
        self._uses.clear()
        self.sharded.finish()
        self.agreement.passed()
        self.micro_batch += 1
        self.gradients.show(self.micro_batch >= self.accumulation and not self._unsynchronized)
        self._scaling.show()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DistributedDataParallel's: passes inside are not the last before `optimizer.step()`."""
        self._unsynchronized = True
        try:
            yield
        finally:
            self._unsynchronized = False

    def _then_restart(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        @wraps(zero_grad)
        def zero(*args: Any, **kwargs: Any) -> None:
            self.restart()
            zero_grad(*args, **kwargs)

        return zero

    def _hide_gradients(self) -> None:
        self.gradients.hide()
        self._scaling.hide()

    def restart(self) -> None:
        """Forget the gradients of this step, as `zero_grad` does; a batch may be skipped so."""
        self._hide_gradients()
        if self.micro_batch:
            self.micro_batch = 0
            self.agreement.forget()
            if self._forward:
                self.sharded.begin_backward(0, self.accumulation)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs:
            raise RuntimeError(
                "optimizer.step(closure): call the closure yourself, then optimizer.step() without it"
            )
        if not self.micro_batch:
            raise RuntimeError(
                "optimizer.step() without a backward pass through the wrapped module since the last step: call the "
                "module itself (not one of its methods), and backward() on a loss of what it returns: tensors, or "
                "containers and objects that hold them"
            )
        for bucket in self.sharded.buckets:
            bucket.adopt_writes()
        self.gradients.check()
        self.sharded.reducer.reduce_early()
        unused = self.agreement.reach()
        for shard in self._shards:
            grad = None if shard.index in unused else shard.gradient.to(shard.parameter.dtype)
            shard.parameter.grad = grad
        if self.clip:
            self._clip()

    def _clip(self) -> None:
        group = self.sharded.sharding.group
        gradients = [s.parameter.grad for s in self._shards if s.parameter.grad is not None]
        # A rank whose shards are all padding has nothing to add, but takes part in the sum.
        like = self.sharded.buckets[0].master
        squares = kernels.norm_squared(gradients) if gradients else torch.zeros((), device=like.device)
        if self.sharded.sharding.stage:
            group.all_reduce(squares, SUM, purpose="norm").wait()
        factor = (self.clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _after_step(self, *arguments: Any) -> None:
        self.micro_batch = 0
        for shard in self._shards:
            shard.parameter.grad = None
        for bucket in self.sharded.buckets:
            if bucket.master is not bucket.shard:
                bucket.shard.copy_(bucket.master)
        self.sharded.all_gather_params()
