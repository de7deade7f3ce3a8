"""The suite's GPT for DeepSpeed, and access to the states of DeepSpeed's optimizers in stages 0 to 3.

The code uses names of attributes of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from repro.config import Experiment, Layout, Training
from repro.config.enums import Category
from repro.engines.native.model_part import decays
from repro.model.gpt import GPT, BatchPosition, initial_values
from repro.model.layer import Masks
from repro.parallel import storage
from repro.parallel.mesh import Mesh
from repro.parallel.storage import DTYPES
from repro.parallel.zero.stages import leave_meta


class States:
    """Parameters, gradients and optimizer states of one DeepSpeed engine."""

    def __init__(self, engine: Any, layout: Layout):
        self.engine, self.stage = engine, layout.zero
        self.optimizer = engine.optimizer
        self.mixed = layout.precision != "fp32"
        self.place = Category.HOST if layout.offload_optimizer else Category.OPTIMIZER
        """Memory category of the optimizer states: host memory with offload."""
        self.rank, self.ranks = 0, 1
        if self.stage:
            group = self.optimizer.dp_process_group
            self.rank, self.ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self.names = {id(p): name for name, p in engine.module.named_parameters()}
        self._whole: list[Any] = []
        """Handles of the hooks that set the memory category of full gradients; empty if none are set."""

    def elements(self) -> int:
        """Return the number of parameter elements with padding, summed over all dp ranks."""
        if self.stage in (1, 2):
            return sum(flat.numel() for flat in self.optimizer.bit16_groups_flat)
        if self.stage == 3:
            return sum(p.ds_tensor.ds_numel * self.ranks for p in self._parameters())
        return sum(p.numel() for p in self._parameters())

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter by name, gathered over the dp ranks under stage 3."""
        if self.stage < 3:
            return {self.names[id(p)]: p.detach().clone() for p in self._parameters()}
        from deepspeed.runtime.zero import GatheredParameters

        found = {}
        for parameter in self._parameters():
            with GatheredParameters([parameter]):
                found[self.names[id(parameter)]] = parameter.detach().clone()
        return found

    def set_initial_values(self, values: InitialValuesByName) -> None:
        """Set the master weights to unrounded fp32 initial values, and AdamW's step count to 0, as in every engine.

        DeepSpeed copies its masters from rounded weights, and stage 0 takes a step with zero gradients to create the
        moments (github.com/deepspeedai/DeepSpeed/pull/5104).
        """
        with torch.no_grad():
            for parameter, start, master in self._masters():
                master.copy_(values[self.names[id(parameter)]](start, start + master.numel()))
            if self.stage == 0:
                for state in self.optimizer.optimizer.state.values():
                    state["step"].zero_()

    def mark_whole_gradients(self) -> None:
        """Set hooks that assign the memory category of stage 1's full gradients, until `mark` marks all tensors."""
        if self.stage == 1:
            self._whole = [p.register_post_accumulate_grad_hook(_mark_gradient) for p in self._parameters()]

    def mark(self) -> None:
        """Set the memory category of all parameters, gradients, optimizer states and communication buffers."""
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
        """Yield the buckets in which DeepSpeed collects gradients for a reduction (stages 1 to 3)."""
        if self.stage:
            for bucket in self.optimizer.ipg_buckets.values():
                yield bucket.buffer

    def _parameters(self) -> Iterable[Any]:
        """Return the model's parameters, to which DeepSpeed adds attributes that the type `Parameter` lacks."""
        found: Iterable[Any] = self.engine.module.parameters()
        return found

    def _masters(self) -> Iterator[tuple[Parameter, int, Tensor]]:
        """Yield (parameter, first element of this rank's part, flat fp32 master weights of the part)."""
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
                    mine = max(0, min(size, p.ds_numel - start))  # shards of the last ranks end in padding
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
    """Set the memory category of the gradient of `p`, unless it is a view of a gradient bucket."""
    if p.grad is not None and p.grad.nbytes == p.grad.untyped_storage().nbytes():
        storage.mark(p.grad, Category.GRADIENTS)


def _mark(tensors: Any, category: Category) -> None:
    """Set the memory category of all tensors in `tensors`, which is a tensor or a nested collection of tensors."""
    for leaf in tree_leaves(tensors if isinstance(tensors, (dict, Tensor)) else list(tensors)):
        if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes():
            storage.mark(leaf.detach(), category)


class DeepSpeedGPT(GPT):
    """GPT whose blocks DeepSpeed's activation checkpointing recomputes, if the layout requests recomputation."""

    def __init__(self, experiment: Experiment, mesh: Mesh):
        super().__init__(experiment.model, experiment.layout, experiment.training, mesh.tp)
        self.recompute = experiment.layout.has_checkpoints

    def run_block(self, block: Module, x: Tensor, place: BatchPosition, masks: Masks) -> Tensor:
        if not self.recompute:
            return super().run_block(block, x, place, masks)
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

        # With partitioned activations DeepSpeed accepts tensor arguments only.
        return checkpoint(partial(block, place=place, masks=masks), x)


InitialValuesByName = dict[str, Callable[[int, int], Tensor]]
"""For each parameter name, a function that returns the initial fp32 values of elements `start` to `stop` - 1."""


@dataclass(frozen=True)
class DeepSpeedModel:
    """Model that is passed to `deepspeed.initialize`, and properties of its parameters before their partition."""

    model: DeepSpeedGPT
    values: InitialValuesByName
    groups: list[dict[str, Any]]
    """Parameter groups of AdamW: matrices with weight decay, and vectors without."""
    splits: dict[str, int | None]
    """Dimension along which tp splits each parameter, by name; None if tp does not split it."""
    count: int
    """Number of model parameters on this tp rank, before ZeRO shards them."""


def build_model(
    experiment: Experiment, mesh: Mesh, device: torch.device, place: Callable[[Module], object] | None = None
) -> DeepSpeedModel:
    """Return the GPT for DeepSpeed on `device` in the layout's precision, with initial values that all engines share.

    The function `place` is called with the embedding, each block and the head after their initialisation, and
    partitions them.
    """
    training, dtype = experiment.training, DTYPES[experiment.layout.precision]
    model = DeepSpeedGPT(experiment, mesh)
    leave_meta(model, device, dtype)  # The parameters move from `meta` to the device, but have no memory yet.
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = initial_values(names, parameters, experiment, mesh.tp, device)
    decayed, others = ([p for p in parameters if decays(p) is yes] for yes in (True, False))
    built = DeepSpeedModel(
        model,
        {name: partial(values, i) for i, name in enumerate(names)},
        [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}],
        {name: vars(p)["split"] for name, p in zip(names, parameters, strict=True)},
        sum(p.numel() for p in parameters),
    )
    index_of = {id(p): i for i, p in enumerate(parameters)}
    for module in (model.embed, *model.blocks.values(), model.head):
        for parameter in module.parameters():
            i = index_of.pop(id(parameter), None)
            if i is None:
                continue  # The parameter is the tied embedding, which is initialised already.
            parameter.data = values(i, 0, parameter.numel()).view(parameter.shape).to(dtype)
            # DeepSpeed's gradient norm counts parameters without `model_parallel` on one tp rank only.
            parameter.model_parallel = vars(parameter)["split"] is not None  # type: ignore[attr-defined]
        if place is not None:
            place(module)
    return built


def fused_adamw(built: DeepSpeedModel, training: Training) -> torch.optim.AdamW:
    """Return torch's fused AdamW, which DeepSpeed accepts as a client optimizer and which needs no compiler."""
    betas = training.beta1, training.beta2
    return torch.optim.AdamW(built.groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)
