"""Put a module's parameters into buckets and attach what a ZeRO stage needs: the parts, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Parameter

from repro.config import Layout
from repro.parallel import storage
from repro.parallel.comm import Group
from repro.parallel.zero.flat_buffer import Bucket, InitialValues, Tag
from repro.parallel.zero.gather_updated import UpdatedParameterGather
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.parallel.zero.partition import BucketPlan, plan_bucket, plan_buckets
from repro.parallel.zero.units import Unit, parameters_of
from repro.parallel.zero.unshard import ParameterUnsharder
from repro.parallel.zero_r.constant_buffers import bucket_numel


@dataclass(frozen=True)
class Sharding:
    """How parameters are spread over the dp group."""

    stage: int
    group: Group
    device: torch.device
    bucket_bytes: int
    all_reduce_first: bool
    """Stage 1 as in February 2020: all-reduce, then all-gather."""
    dtype: torch.dtype | None
    """Data type of the parameters; None keeps each one's own."""
    constant_buffers: bool = True
    """C_B: buckets of `bucket_bytes`; without, one for the whole module, reduced in fp32."""
    contiguous: bool = False
    """M_D: full gradients of stages 2 and 3 lie in memory set aside once."""
    overlap: bool = True
    """Communicate while the device computes."""
    as_view: bool = True
    """Gradients lie in their buckets; without (stage 0), a bucket is a copy beside them."""
    gather_overlap: bool = True
    """Gather updated parameters (stages 1 and 2) while the next forward pass runs."""

    @staticmethod
    def of(layout: Layout, group: Group, device: torch.device, dtype: torch.dtype | None) -> Sharding:
        """The part of a layout that is about data parallelism."""
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
            gather_overlap=layout.overlap and layout.gather_overlap,
        )


def leave_meta(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Replace parameters on `meta` by ones on the device that own no memory yet; shared ones stay shared."""
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
    """Bring frozen and empty floating-point parameters, and floating-point buffers, to `dtype`.

    With the trained ones in buckets of `dtype` the module is then what `module.to(dtype)` is: most
    modules cannot mix (a linear layer, or a batch norm whose running statistics are not of its weights' dtype).
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
    """A module whose parameters live in buckets, with the hooks that communicate them."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        sharding: Sharding,
        tag_of: Callable[[Parameter], Tag],
        values: Callable[[list[Parameter]], InitialValues],
    ):
        self.module, self.sharding = module, sharding
        leave_meta(module, sharding.device, sharding.dtype)
        if sharding.dtype is not None:
            cast_untrained(module, sharding.dtype)
        # Frozen and empty parameters stay outside buckets: nothing of them is communicated.
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
        self.names = [name for name, _ in trained]
        self.parameters = [p for _, p in trained]
        self.shapes = [p.shape for p in self.parameters]
        initial = values(self.parameters)
        tags = [tag_of(p) for p in self.parameters]
        self.buckets: list[Bucket] = []
        """In the order in which their gradients come, the last layers first."""
        self.gatherer: ParameterUnsharder | None = None

        def make(plan: BucketPlan[Tag]) -> Bucket:
            chosen = [self.parameters[slot.index] for slot in plan.slots]
            dtype = sharding.dtype or chosen[0].dtype
            bucket = Bucket(
                plan,
                chosen,
                initial,
                stage=sharding.stage,
                group=sharding.group,
                device=sharding.device,
                dtype=dtype,
                master_weights=dtype.itemsize < 4,
                all_reduce_first=sharding.all_reduce_first,
                fused=not sharding.constant_buffers,
                as_view=sharding.as_view,
            )
            self.buckets.append(bucket)
            return bucket

        with torch.no_grad():
            of_unit: list[list[Bucket]] = []
            if sharding.stage == 3:
                of_unit = self._shard_units(units, tags, make)
            else:
                for plan in self._plans(tags):
                    make(plan)
        self.reducer = GradientReducer(
            self.buckets,
            by_arrival=sharding.stage < 3,
            contiguous=sharding.contiguous,
            overlap=sharding.overlap,
        )
        if sharding.stage == 3:
            self.gatherer = ParameterUnsharder(module, units, of_unit, self.reducer.close)
        self.param_gather: UpdatedParameterGather | None = None
        if sharding.stage in (1, 2):
            ahead = units if sharding.gather_overlap else ()
            self.param_gather = UpdatedParameterGather(module, ahead, self.buckets)

    @property
    def padding(self) -> int:
        """Elements that the buckets hold beyond the parameters."""
        return sum(bucket.plan.padded - bucket.plan.numel for bucket in self.buckets)

    def begin_forward(self) -> None:
        """Before a forward pass: what stage 3 notes of its order of uses begins anew."""
        if self.gatherer is not None:
            self.gatherer.begin()

    def begin_backward(self, micro_batch: int, micro_batches: int) -> None:
        """Before the backward pass of one of the step's micro-batches."""
        self.reducer.begin(micro_batch, micro_batches)

    def begin(self, micro_batch: int, micro_batches: int) -> None:
        """Before a micro-batch of which backward follows upon forward, as in every step without a pipeline."""
        self.begin_backward(micro_batch, micro_batches)
        self.begin_forward()

    def end_backward(self) -> None:
        """After its backward pass: gradients are under reduction (the last micro-batch's, or every one's by stage).

        Without overlap `wait_gradients` begins it.
        """
        if self.gatherer is not None:
            self.gatherer.finish()
        self.reducer.finish()

    def wait_gradients(self) -> None:
        """Wait until `gradient_shard` of every bucket holds the mean over the replicas."""
        self.reducer.wait()

    def finish(self) -> None:
        """After a backward pass upon which the optimizer step follows at once."""
        self.end_backward()
        self.wait_gradients()

    def all_gather_params(self) -> None:
        """After the optimizer step: let every rank have the new parameters (stages 1 and 2)."""
        if self.param_gather is not None:
            self.param_gather.start()
            if not self.sharding.gather_overlap:
                self.param_gather.wait()

    def wait(self) -> None:
        """Wait for parameters that are being gathered, before anyone reads them outside a forward pass."""
        if self.param_gather is not None:
            self.param_gather.wait()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """A copy of every (tp-local) parameter, complete, by name; for tests and checkpoints."""
        self.wait()
        if self.gatherer is not None:
            self.gatherer.free_all()
        found: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            if self.sharding.stage == 3:
                bucket.gather().wait()
            for slot in bucket.plan.slots:
                values = bucket.full[slot.start : slot.stop].clone()
                found[self.names[slot.index]] = values.view(self.shapes[slot.index])
            if self.sharding.stage == 3:
                storage.release(bucket.full)
        return found

    def remove_hooks(self) -> None:
        """Undo what was attached to the module; its parameters stay in the buckets."""
        self.reducer.remove()
        if self.gatherer is not None:
            self.gatherer.remove()
        if self.param_gather is not None:
            self.param_gather.remove()

    def _apart(self, indices: Sequence[int], tags: Sequence[Tag]) -> list[list[int]]:
        """Indices split by the parameters' dtype, which one flat buffer cannot mix, and by `tied`.

        The first and the last pipeline stage cut a bucket that holds nothing but what they share alike.
        """
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i in indices:
            dtype = self.sharding.dtype or self.parameters[i].dtype
            kinds.setdefault((dtype, tags[i].tied), []).append(i)
        return list(kinds.values())

    def _plans(self, tags: Sequence[Tag]) -> list[BucketPlan[Tag]]:
        """The buckets of stages 0 to 2, the last layers' first, since their gradients come first."""
        plans = []
        backwards = list(range(len(self.parameters)))[::-1]
        for indices in self._apart(backwards, tags):
            sizes = [(i, self.parameters[i].numel(), tags[i]) for i in indices]
            dtype = self.sharding.dtype or self.parameters[indices[0]].dtype
            total = sum(size for _, size, _ in sizes)
            sharding = self.sharding
            limit = bucket_numel(total, sharding.bucket_bytes, dtype, constant=sharding.constant_buffers)
            plans += plan_buckets(sizes, sharding.group.size, limit)
        return plans

    def _shard_units(
        self, units: Sequence[Unit], tags: Sequence[Tag], make: Callable[[BucketPlan[Tag]], Bucket]
    ) -> list[list[Bucket]]:
        """Make the buckets of every unit, one a dtype."""
        index_of = {id(p): i for i, p in enumerate(self.parameters)}
        of_unit: list[list[Bucket]] = []
        for parameters in parameters_of(self.module, units):
            indices = [index_of[id(p)] for p in parameters if id(p) in index_of]
            # Matrices and vectors apart, so that a shard has few runs of one tag.
            indices.sort(key=lambda i: (tags[i].group, tags[i].duplicate, tags[i].partial))
            n = self.sharding.group.size
            of_unit.append(
                [
                    make(plan_bucket([(i, self.parameters[i].numel(), tags[i]) for i in same], n))
                    for same in self._apart(indices, tags)
                ]
            )
        modules = dict(self.module.named_modules())
        order = {name: i for i, name in enumerate(modules)}
        last_use = [min(order[use.module] for use in unit.uses) for unit in units]
        backwards = sorted(range(len(units)), key=lambda u: -last_use[u])
        self.buckets = [bucket for u in backwards for bucket in of_unit[u]]
        return of_unit
