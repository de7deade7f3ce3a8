"""Hooks that run the communication of a wrapped module in a stock training loop, in forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from repro import kernels
from repro.parallel.comm import MAX, SUM, Group
from repro.parallel.zero.backward_schedule import tensors_in
from repro.parallel.zero.grad_reduce import broadcast_parameters
from repro.parallel.zero.partition import GatherUnit, parameters_by_unit
from repro.parallel.zero.stages import ShardedModule
from repro.wrap.gradients import GradScalerSupport, UserGradients
from repro.wrap.refusals import UnchangedModuleCheck
from repro.wrap.state_dicts import OptimizerStates, Shard, WrappedModule


class StepAgreement:
    """Agreement of all ranks, once a step, on unused parameters and changed buffers.

    A parameter that no rank used has no gradient: torch's optimizers skip the parameter, weight decay included. Buffers
    that a forward pass changes (running statistics) get the values of rank 0, as in DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, sharded: ShardedModule, host: Group):
        self._sharded, self._host = sharded, host
        self._children = [child for child in module.modules() if child._buffers]
        self._known_states = self._states()
        self._unused: set[int] | None = None

    def _states(self) -> list[list[tuple[int, int]]]:
        """Return the id and the version of every module buffer, which show whether a buffer was replaced or written.

        torch's batch norm writes its running statistics without a new version, but its batch counter gets one.
        """
        return [
            [(id(buffer), buffer._version) for buffer in child._buffers.values() if buffer is not None]
            for child in self._children
        ]

    def record_backward(self) -> None:
        """Record which parameters got no gradient in the backward pass that has just ended."""
        missing = self._sharded.reducer.missing()
        self._unused = missing if self._unused is None else self._unused & missing

    def reset(self) -> None:
        """Discard the records of parameters without gradients in the current step."""
        self._unused = None

    def reach(self) -> set[int]:
        """Broadcast changed buffers from rank 0, and return the indices of the parameters that no rank used."""
        unused, self._unused = self._unused or set(), None
        if self._host.size == 1:
            return unused
        parameters = len(self._sharded.parameters)
        flags = [i not in unused for i in range(parameters)]
        flags += [state != known for state, known in zip(self._states(), self._known_states, strict=True)]
        shared = torch.tensor(flags, dtype=torch.uint8)
        self._host.all_reduce(shared, MAX, purpose="agreement").wait()
        changed = [
            child for child, flag in zip(self._children, shared[parameters:].tolist(), strict=True) if flag
        ]
        if changed:
            buffers = [b for child in changed for b in child._buffers.values() if b is not None]
            broadcast_parameters(buffers, self._sharded.sharding.group)
            self._known_states = self._states()
        return {i for i in unused if not shared[i]}


class StockLoop:
    """Hooks on forward, backward and `optimizer.step` of a wrapped module in a stock training loop."""

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
        """Install the hooks. `host`: gloo group of all ranks, for small values that the CPU reads immediately."""
        self.sharded, self.accumulation, self.clip = sharded, accumulation, clip
        self.micro_batch = 0
        self._is_backward_due = False
        """Whether a forward pass has run since the last backward pass."""
        self._has_gradients = False
        """Whether autograd records the current forward pass, or recorded the last forward pass."""
        self._in_backward = False
        """Whether a backward pass of the wrapped module is running."""
        self._had_grad_only_backward = False
        """Whether `torch.autograd.grad` has computed input gradients since the last full backward pass."""
        self._uses: dict[int, tuple[int, bool]] = {}
        """By `id` of a block: forward calls since the last backward pass, and whether one ran under `no_grad`."""
        self._in_no_sync = False
        """Whether `module.no_sync()` is active, in which no backward pass is the step's last."""
        self._shards = self._make_shards(optimizer)
        self.states = OptimizerStates(optimizer, sharded, self._shards, host)
        self._replace_parameters(optimizer)
        pieces = {shard.index: shard.gradient for shard in self._shards if shard.gradient.numel()}
        self.gradients = UserGradients(sharded, pieces)
        others = sharded.sharding.group if sharded.sharding.stage else None
        self._grad_scaler = GradScalerSupport(self._shards, others, self.gradients.norms.prepare_change)
        self._module_check = UnchangedModuleCheck(module, sharded, optimizer)
        self.agreement = StepAgreement(module, sharded, host)
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward)
        sharded.reducer.on_gradient = self._on_grad_only_gradient
        if sharded.reducer.by_arrival:
            self._delay_repeated_blocks(module, units)
        sharded.guard(units)
        module.no_sync = self.no_sync  # type: ignore[assignment]
        for owner in (module, optimizer):
            vars(owner)["zero_grad"] = self._then_restart(owner.zero_grad)
        # GradScaler must unscale gradients before `_before_step` clips them. A fused optimizer unscales them later.
        vars(optimizer)["_step_supports_amp_scaling"] = False
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _make_shards(self, optimizer: torch.optim.Optimizer) -> list[Shard]:
        """Return this rank's parameter shards, in the order of the optimizer's parameters."""
        position = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        shards = []
        for bucket in self.sharded.buckets:
            for index, first, last, start in bucket.pieces():
                here = slice(start, start + last - first)
                parameter = Parameter(bucket.master[here])
                shards.append(Shard(index, first, last, parameter, bucket.gradient_shard[here]))
        if not shards:  # All elements of this rank are padding, but its optimizer needs a parameter.
            bucket = self.sharded.buckets[0]
            empty = Parameter(bucket.master[:0])
            shards.append(Shard(bucket.plan.slots[0].index, 0, 0, empty, bucket.gradient_shard[:0]))
        return sorted(shards, key=lambda shard: position[id(self.sharded.parameters[shard.index])])

    def _replace_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the module's parameters in the optimizer by this rank's shards."""
        for group in optimizer.param_groups:
            mine = {id(p) for p in group["params"]}
            group["params"] = [
                s.parameter for s in self._shards if id(self.sharded.parameters[s.index]) in mine
            ]

    def _delay_repeated_blocks(self, module: nn.Module, units: Sequence[GatherUnit]) -> None:
        """Delay the reduction of a block's gradients if reentrant checkpointing runs the block twice in a pass.

        Under stages 0 to 2 autograd then accumulates the gradients of the block's parameters once per run.
        """
        bucket_of = {id(p): bucket for bucket in self.sharded.buckets for p in bucket.parameters}
        names = dict(module.named_modules())

        def watch(parameters: list[Parameter]) -> Callable[..., None]:
            buckets = [bucket_of[id(p)] for p in parameters if id(p) in bucket_of]

            def count(block: nn.Module, inputs: Any) -> None:
                if not self._has_gradients or self._in_backward:
                    return  # A forward pass of evaluation or recomputation adds no gradient contribution.
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
        if self._in_backward and torch._C._current_graph_task_id() != -1:
            return  # Activation checkpointing recomputes the full module during the backward pass.
        self._in_backward = False  # After a failed backward pass, `_in_backward` is still true.
        self._has_gradients = torch.is_grad_enabled()
        if not self._has_gradients:
            if self.sharded.gatherer is not None:
                self.sharded.gatherer.begin_forward()
            return
        if not torch.compiler.is_compiling():  # torch.compile would trace this check of the parameters.
            self._module_check.check()
        self._is_backward_due = True
        self._hide_gradients()
        # ZeRO stages 0 and 1 reduce gradients after the last micro-batch, or in `_before_step` if the last is unknown.
        passes = self.micro_batch + 2 if self._in_no_sync else self.accumulation
        self.sharded.begin(self.micro_batch, passes)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.sharded.gatherer is not None and not self._in_backward:
            self.sharded.gatherer.end_forward()
        for tensor in tensors_in(output, attributes=True):
            if tensor.requires_grad:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor | None) -> None:
        if not self._in_backward:
            if self.sharded.grad_only_backward.is_running():
                self._had_grad_only_backward = True
                return
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "backward(create_graph=True) is not supported. For a penalty on gradients, call "
                    "torch.autograd.grad(..., create_graph=True) for the inputs of the module."
                )
            if not self._is_backward_due:
                raise RuntimeError(
                    "A second backward pass after one forward pass is not supported. Sum the losses for one backward "
                    "pass, or run each forward pass directly before its backward pass."
                )
            self._in_backward = True
            # `queue_callback` calls its argument at the end of a backward pass. torch's DDP and FSDP use it as well.
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]

    def _on_grad_only_gradient(self) -> None:
        """Begin the backward pass of a loss that depends on input gradients only, and not on the module's output."""
        if self._had_grad_only_backward and not self._in_backward:
            self._on_backward(None)

    def _after_backward(self) -> None:
        self._in_backward = self._is_backward_due = self._had_grad_only_backward = False
        self._uses.clear()
        self.sharded.finish()
        self.agreement.record_backward()
        self.micro_batch += 1
        self.gradients.show(self.micro_batch >= self.accumulation and not self._in_no_sync)
        self._grad_scaler.show()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Declare that no backward pass in this context is the step's last, as in DistributedDataParallel."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def _then_restart(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        @wraps(zero_grad)
        def zero(*args: Any, **kwargs: Any) -> None:
            self.restart()
            zero_grad(*args, **kwargs)

        return zero

    def _hide_gradients(self) -> None:
        self.gradients.hide()
        self._grad_scaler.hide()

    def restart(self) -> None:
        """Discard the gradients of this step, as `zero_grad` does, for example to skip a batch."""
        self._hide_gradients()
        if self.micro_batch:
            self.micro_batch = 0
            self.agreement.reset()
            if self._is_backward_due:
                self.sharded.begin_backward(0, self.accumulation)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs:
            raise RuntimeError(
                "optimizer.step(closure) is not supported. Call the closure, then optimizer.step() without it."
            )
        if not self.micro_batch:
            raise RuntimeError(
                "optimizer.step() without a backward pass through the wrapped module is not supported. Call the module "
                "itself (not one of its methods), and backward() on a loss of the tensors that it returns."
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
        # A rank whose shards are only padding adds 0 to the all-reduce of the squared gradient norm.
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
