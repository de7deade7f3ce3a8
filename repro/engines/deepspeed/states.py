"""What DeepSpeed's optimizers hold: where each kind of state lies in stages 0 to 3, to fill it and to mark it.

The names are of DeepSpeed 0.19: `fp32_groups` (stage 0 in 16 bits), `bit16_groups_flat` and
`single_partition_of_fp32_groups` (1 and 2), `lp_param_buffer`, `fp32_partitioned_groups_flat` and
`grad_partitions_flat_buffer` (3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from repro.config import Layout
from repro.config.enums import Category
from repro.engines.deepspeed.model import ValuesOf
from repro.parallel import storage


class States:
    """The states of one DeepSpeed engine."""

    def __init__(self, engine: Any, layout: Layout):
        self.engine, self.stage = engine, layout.zero
        self.optimizer = engine.optimizer
        self.mixed = layout.precision != "fp32"
        self.place = Category.HOST if layout.offload_optimizer else Category.OPTIMIZER
        """Where the states of the optimizer are: with offload, with their gradients, in host memory."""
        self.rank, self.ranks = 0, 1
        if self.stage:
            group = self.optimizer.dp_process_group
            self.rank, self.ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self.names = {id(p): name for name, p in engine.module.named_parameters()}
        self._whole: list[Any] = []
        """Hooks that mark gradients which are there before the update begins, and not any more when it does."""

    def elements(self) -> int:
        """Elements of the parameters with all padding, over all ranks of dp."""
        if self.stage in (1, 2):
            return sum(flat.numel() for flat in self.optimizer.bit16_groups_flat)
        if self.stage == 3:
            return sum(p.ds_tensor.ds_numel * self.ranks for p in self._parameters())
        return sum(p.numel() for p in self._parameters())

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every parameter, complete over dp, by name."""
        if self.stage < 3:
            return {self.names[id(p)]: p.detach().clone() for p in self._parameters()}
        from deepspeed.runtime.zero import GatheredParameters

        found = {}
        for parameter in self._parameters():
            with GatheredParameters([parameter]):
                found[self.names[id(parameter)]] = parameter.detach().clone()
        return found

    def begin(self, values: ValuesOf) -> None:
        """Start in 16 bits where every engine starts: from unrounded fp32 weights, and before AdamW's first step.

        DeepSpeed's masters begin as copies of rounded weights, and stage 0 makes the moments by a step of zero
        gradients, which AdamW counts (github.com/deepspeedai/DeepSpeed/pull/5104).
        """
        with torch.no_grad():
            for parameter, start, master in self._masters():
                master.copy_(values[self.names[id(parameter)]](start, start + master.numel()))
            if self.stage == 0:
                for state in self.optimizer.optimizer.state.values():
                    state["step"].zero_()

    def mark_whole_gradients(self) -> None:
        """Until the next call of `mark`: mark gradients as they come, since stage 1 keeps all until it reduces them."""
        if self.stage == 1:
            self._whole = [p.register_post_accumulate_grad_hook(_mark_gradient) for p in self._parameters()]

    def mark(self) -> None:
        """Mark every storage that now holds parameters, gradients, optimizer states or what is communicated."""
        optimizer = self.optimizer
        while self._whole:
            self._whole.pop().remove()
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
        _mark(self._buffers(), Category.COMMUNICATION)
        _mark((p.data for p in self._parameters()), Category.PARAMETERS)
        _mark((p.grad for p in self._parameters()), Category.GRADIENTS)
        _mark(getattr(optimizer, "averaged_gradients", {}), Category.GRADIENTS)
        _mark(list(inner.state.values()), self.place)
        if self.stage in (1, 2):
            _mark(optimizer.bit16_groups_flat, Category.PARAMETERS)
            _mark(optimizer.all_grad_tensors, Category.GRADIENTS)
            _mark((p.grad_accum for p in self._parameters()), Category.GRADIENTS)
            self._mark_masters(optimizer.single_partition_of_fp32_groups)
            _mark(optimizer.round_robin_bit16_meta, Category.SHAPE)
        elif self.stage == 3:
            _mark(
                [optimizer.lp_param_buffer, *(p.ds_tensor for p in self._parameters())], Category.PARAMETERS
            )
            offloaded = self.place == Category.HOST
            _mark(optimizer.grad_partitions_flat_buffer, self.place if offloaded else Category.GRADIENTS)
            self._mark_masters(optimizer.fp32_partitioned_groups_flat)
        elif self.mixed:
            _mark(optimizer.fp32_groups, Category.OPTIMIZER)

    def _mark_masters(self, masters: Sequence[Tensor]) -> None:
        _mark(masters, self.place)
        if self.place == Category.HOST:
            _mark((master.grad for master in masters), self.place)

    def _buffers(self) -> Iterator[Any]:
        """What gradients are copied to before they are reduced."""
        if self.stage:
            for bucket in self.optimizer.ipg_buckets.values():
                yield bucket.buffer

    def _parameters(self) -> Iterable[Any]:
        """Those of the model, with the attributes that DeepSpeed gives them."""
        found: Iterable[Any] = self.engine.module.parameters()
        return found

    def _masters(self) -> Iterator[tuple[Parameter, int, Tensor]]:
        """This rank's fp32 weights, flat, parameter by parameter, each with the element at which it starts."""
        optimizer = self.optimizer
        if self.stage == 0:
            for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                yield from ((p, 0, m.view(-1)) for p, m in zip(parameters, masters, strict=True))
        elif self.stage == 3:
            for parameters, flat in zip(
                optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
            ):
                place = 0
                for p in parameters:
                    size = p.partition_numel()
                    start = self.rank * size
                    mine = max(0, min(size, p.ds_numel - start))  # the last ranks' parts may end in padding
                    yield p, start, flat[place : place + mine]
                    place += size
        else:
            groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
            for parameters, flat in groups:
                low = self.rank * flat.numel()
                place = 0
                for p in parameters:
                    start, stop = max(place, low), min(place + p.numel(), low + flat.numel())
                    if start < stop:
                        yield p, start - place, flat[start - low : stop - low]
                    place += p.numel()


def _mark_gradient(p: Parameter) -> None:
    """Unless DeepSpeed has moved it to a bucket."""
    if p.grad is not None and p.grad.nbytes == p.grad.untyped_storage().nbytes():
        storage.mark(p.grad, Category.GRADIENTS)


def _mark(held: Any, category: Category) -> None:
    """Mark the storages of all tensors in `held`, however nested."""
    for leaf in tree_leaves(held if isinstance(held, (dict, Tensor)) else list(held)):
        if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes():
            storage.mark(leaf.detach(), category)
