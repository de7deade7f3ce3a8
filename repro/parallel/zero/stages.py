"""A ZeRO stage applied to a module: buckets of parameters, and hooks for gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from repro.parallel import storage
from repro.parallel.zero.backward_schedule import GradOnlyBackward
from repro.parallel.zero.flat_buffer import Bucket
from repro.parallel.zero.flat_parameters import (
    FlatParameters,
    InitialValues,
    Sharding,
    Tag,
    is_below_persistence_threshold,
)
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.parallel.zero.optimizer import UpdatedParameterGather
from repro.parallel.zero.partition import (
    BucketPlan,
    GatherUnit,
    parameters_by_unit,
    plan_bucket,
    plan_buckets,
)
from repro.parallel.zero.unshard import ParameterUnsharder
from repro.parallel.zero_r.constant_buffers import bucket_numel


def leave_meta(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Replace parameters on `meta` by parameters on the device with one element of memory; retain shared parameters."""
    replaced: dict[int, Parameter] = {}
    for child in module.modules():
        for name, old in list(child._parameters.items()):
            if old is None or old.device.type != "meta" or device.type == "meta":
                continue
            if id(old) not in replaced:
                one = torch.empty((), dtype=dtype or old.dtype, device=device)
                new = Parameter(one.expand(old.shape), requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                replaced[id(old)] = new
            child._parameters[name] = replaced[id(old)]


def cast_untrained(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert frozen and empty floating-point parameters, and floating-point buffers, to `dtype`.

    If its trained parameters are in buckets of `dtype`, the module then equals `module.to(dtype)`. Most modules cannot
    mix dtypes (a linear layer, or a batch norm whose running statistics have another dtype than its weights).
    """
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is None or (parameter.requires_grad and parameter.numel()):
                continue
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)


class ShardedModule:
    """Module under a ZeRO stage: parameters in flat buckets, and hooks that communicate gradients and parameters."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[GatherUnit],
        sharding: Sharding,
        tag_of: Callable[[Parameter], Tag],
        values: Callable[[list[Parameter]], InitialValues],
    ):
        self.module, self.sharding = module, sharding
        leave_meta(module, sharding.device, sharding.dtype)
        if sharding.dtype is not None:
            cast_untrained(module, sharding.dtype)
        self._named = dict(module.named_parameters())
        # Empty parameters, and frozen ones except under stage 3, are not communicated and not in buckets.
        trained = [(name, p) for name, p in self._named.items() if p.requires_grad and p.numel()]
        self.names = [name for name, _ in trained]
        self.parameters = [p for _, p in trained]
        self.shapes = [p.shape for p in self.parameters]
        frozen = [p for p in self._named.values() if not p.requires_grad and p.numel()]
        self._placed = [*self.parameters, *(frozen if sharding.stage == 3 else ())]
        initial = values(self._placed)
        tags = [tag_of(p) for p in self.parameters] + [Tag(-1)] * (len(self._placed) - len(trained))
        self.buckets: list[Bucket] = []
        """Buckets in the order in which backward computes their gradients, the last layers first."""
        self.frozen: list[FlatParameters] = []
        """Flat buffers of frozen parameters, which stage 3 shards too; empty under other stages."""
        self.gatherer: ParameterUnsharder | None = None

        def make(plan: BucketPlan[Tag]) -> FlatParameters:
            chosen = [self._placed[slot.index] for slot in plan.slots]
            dtype = self._dtype(plan.slots[0].index)
            if not chosen[0].requires_grad:
                flat = FlatParameters(plan, chosen, sharding, dtype)
                self.frozen.append(flat)
                return flat
            bucket = Bucket(plan, chosen, sharding, dtype)
            self.buckets.append(bucket)
            return bucket

        with torch.no_grad():
            of_unit: list[list[FlatParameters]] = []
            if sharding.stage == 3:
                of_unit = self._shard_units(units, tags, make)
            else:
                for plan in self._plans(tags):
                    make(plan)
            # Fill buckets only after all are allocated: temporary tensors of initial values would fragment memory.
            for bucket in self.buckets:
                bucket.fill(initial, bucket.master)
            for flat in self.frozen:
                flat.fill(initial, flat.shard)
        self.reducer = GradientReducer(self.buckets, sharding)
        self.grad_only_backward = GradOnlyBackward(self.parameters)
        if sharding.stage == 3:
            self.gatherer = ParameterUnsharder(
                module,
                units,
                of_unit,
                self._complete,
                self.grad_only_backward,
                ahead=not sharding.by_parameter,
            )
        self.param_gather: UpdatedParameterGather | None = None
        if sharding.stage in (1, 2):
            ahead = units if sharding.gather_overlap else ()
            self.param_gather = UpdatedParameterGather(module, ahead, self.buckets)

    @property
    def padding(self) -> int:
        """Return the number of padding elements in all buckets of the module."""
        return sum(bucket.plan.padded - bucket.plan.numel for bucket in self.buckets)

    def begin_forward(self) -> None:
        """Prepare the module for a forward pass: stage 3 starts to record the order of module calls."""
        if self.gatherer is not None:
            self.gatherer.begin_forward()

    def begin_backward(self, micro_batch: int, micro_batches: int) -> None:
        """Prepare the gradient buckets for backward pass number `micro_batch` of a step's `micro_batches` passes."""
        self.reducer.begin(micro_batch, micro_batches)

    def begin(self, micro_batch: int, micro_batches: int) -> None:
        """Prepare the module for a micro-batch whose backward pass directly follows its forward pass (no pipeline)."""
        self.begin_backward(micro_batch, micro_batches)
        self.begin_forward()

    def end_backward(self) -> None:
        """End a micro-batch's backward pass, and start the reductions of its gradients.

        Stages 0 and 1 reduce gradients after the last micro-batch; without overlap, `wait_gradients` starts reductions.
        """
        if self.gatherer is not None:
            self.gatherer.finish_backward()
        self.reducer.finish()

    def wait_gradients(self) -> None:
        """Wait until the gradient shard of every bucket is the mean over the data-parallel replicas."""
        self.reducer.wait()

    def finish(self) -> None:
        """End a backward pass, and wait for the reductions of its gradients."""
        self.end_backward()
        self.wait_gradients()

    def all_gather_params(self) -> None:
        """Start to gather updated parameters after an optimizer step (stages 1 and 2), or free old ones (stage 3)."""
        if self.gatherer is not None:
            self.gatherer.free_all()
        if self.param_gather is not None:
            self.param_gather.start()
            if not self.sharding.gather_overlap:
                self.param_gather.wait()

    def wait(self) -> None:
        """Wait until the updated parameters are gathered, before code outside a forward pass reads them."""
        if self.param_gather is not None:
            self.param_gather.wait()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return a copy of every parameter by name, gathered from its ZeRO shards but local to the tp rank."""
        self.wait()
        if self.gatherer is None:
            return {name: p.detach().clone() for name, p in self._named.items()}
        retains_units = self.gatherer.retains_units
        self.gatherer.free_all()
        found: dict[int, torch.Tensor] = {}
        for flat in (*self.buckets, *self.frozen):
            flat.gather().wait()
            for slot, p in zip(flat.plan.slots, flat.parameters, strict=True):
                found[id(p)] = flat.full[slot.start : slot.stop].clone().view(p.shape)
            storage.release(flat.full)
        if retains_units:
            self.gatherer.retain_units()
        return {
            name: found[id(p)] if id(p) in found else p.detach().clone() for name, p in self._named.items()
        }

    def remove_hooks(self) -> None:
        """Remove all ZeRO hooks from the module. Its parameters remain views of the buckets."""
        self.reducer.remove()
        if self.gatherer is not None:
            self.gatherer.remove()
        if self.param_gather is not None:
            self.param_gather.remove()

    def _complete(self, flat: FlatParameters) -> None:
        """Record that a bucket gets no more gradients in this backward pass; ignore buffers of frozen parameters."""
        if isinstance(flat, Bucket):
            self.reducer.close(flat)

    def _dtype(self, i: int) -> torch.dtype:
        p = self._placed[i]
        return self.sharding.dtype or p.dtype if p.requires_grad else p.dtype

    def _apart(self, indices: Sequence[int], tags: Sequence[Tag]) -> list[list[int]]:
        """Divide parameter indices into groups of equal dtype, `tied` and `requires_grad`, one for each flat buffer.

        Tied parameters have separate buckets, whose shards are equal on the first and the last pipeline stage.
        """
        kinds: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
        for i in indices:
            key = (self._dtype(i), tags[i].tied, self._placed[i].requires_grad)
            kinds.setdefault(key, []).append(i)
        return list(kinds.values())

    def _gathered_at_once(self, indices: Sequence[int], tags: Sequence[Tag]) -> list[list[int]]:
        """Divide the parameters that a block uses (a gather unit) into groups of one all-gather each under stage 3."""
        apart = self._apart(indices, tags)
        if not self.sharding.by_parameter:
            return apart
        found = []
        for same in apart:
            small = [i for i in same if is_below_persistence_threshold(self._placed[i])]
            found += [*([i] for i in same if i not in small), *([small] if small else [])]
        return found

    def _plans(self, tags: Sequence[Tag]) -> list[BucketPlan[Tag]]:
        """Return the buckets of stages 0 to 2, the last layers first, since backward computes their gradients first."""
        plans = []
        backwards = list(range(len(self.parameters)))[::-1]
        for indices in self._apart(backwards, tags):
            sizes = [(i, self.parameters[i].numel(), tags[i]) for i in indices]
            dtype = self.sharding.grad_dtype or self._dtype(indices[0])
            total = sum(size for _, size, _ in sizes)
            sharding = self.sharding
            limit = bucket_numel(total, sharding.bucket_bytes, dtype, constant=sharding.constant_buffers)
            plans += plan_buckets(sizes, sharding.group.size, limit)
        return plans

    def _shard_units(
        self,
        units: Sequence[GatherUnit],
        tags: Sequence[Tag],
        make: Callable[[BucketPlan[Tag]], FlatParameters],
    ) -> list[list[FlatParameters]]:
        """Create the flat buffers of every gather unit: one for each dtype, and separate ones for frozen parameters."""
        index_of = {id(p): i for i, p in enumerate(self._placed)}
        of_unit: list[list[FlatParameters]] = []
        for parameters in parameters_by_unit(self.module, units):
            indices = [index_of[id(p)] for p in parameters if id(p) in index_of]
            # Sort parameters by their tags (weight decay, tp duplicate), so that a shard has few ranges of equal tags.
            indices.sort(key=lambda i: (tags[i].group, tags[i].duplicate, tags[i].partial))
            n = self.sharding.group.size
            of_unit.append(
                [
                    make(plan_bucket([(i, self._placed[i].numel(), tags[i]) for i in same], n))
                    for same in self._gathered_at_once(indices, tags)
                ]
            )
        modules = dict(self.module.named_modules())
        order = {name: i for i, name in enumerate(modules)}
        last_use = [min(order[use.module] for use in unit.uses) for unit in units]
        backwards = sorted(range(len(units)), key=lambda u: -last_use[u])
        self.buckets = [flat for u in backwards for flat in of_unit[u] if isinstance(flat, Bucket)]
        return of_unit
