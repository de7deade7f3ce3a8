"""Checks that refuse modules and optimizers which `repro.parallelize` cannot train correctly."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

from repro.parallel.zero.stages import ShardedModule


def check_module(module: nn.Module) -> None:
    """Raise `ValueError` for a module that `repro.parallelize` cannot train correctly."""
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"module: a {type(module).__name__} is not supported. Call repro.parallelize(module, optimizer, layout)."
        )
    for name, child in module.named_modules():
        if getattr(child, "repro", None) is not None:
            where = f"submodule {name}" if name else "the module"
            raise ValueError(
                f"module: {where} is parallelized already. Call repro.parallelize once, for the outermost module."
            )
        if isinstance(child, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ValueError(
                f"module: {type(child).__name__} is not supported, because it reduces gradients too. Pass its .module."
            )
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"module: {name} has no shape yet. Run a forward pass before repro.parallelize.")
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"module: {name} is a DTensor, which is not supported. Call repro.parallelize without fully_shard."
            )
        if parameter.is_complex():
            raise ValueError(
                f"module: {name} is complex, which is not supported. Use two parameters for real and imaginary part."
            )
    if not any(p.requires_grad and p.numel() for p in parameters.values()):
        raise ValueError("module: no parameter requires a gradient. Set requires_grad before the call.")
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            if child.max_norm is not None:
                raise ValueError(
                    f"module: {name} has max_norm, which is not supported, because ranks would change the weights "
                    "differently. Set max_norm=None."
                )
            if child.sparse:
                raise ValueError(
                    f"module: {name} has sparse gradients, which are not supported. Set sparse=False."
                )


ELEMENT_BY_ELEMENT = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop),
    *(optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD),
}


def check_optimizer(optimizer: optim.Optimizer, module: nn.Module) -> None:
    """Raise `ValueError` unless the optimizer has the module's parameters and updates each element independently."""
    if not isinstance(optimizer, optim.Optimizer):
        raise ValueError(f"optimizer: {type(optimizer).__name__}: must be a torch.optim.Optimizer.")
    named = {id(p): (name, p) for name, p in module.named_parameters()}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, (name, owned) in named.items():
        if key not in given and owned.requires_grad:
            raise ValueError(
                f"optimizer: {name} requires a gradient and is in no parameter group. Freeze it, or call "
                "repro.parallelize for the modules of each optimizer separately."
            )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in named:
                raise ValueError(
                    f"optimizer: a parameter {list(parameter.shape)} is not in the module. Put all modules of this "
                    "optimizer into one nn.Module, or create an optimizer for each module."
                )
    if type(optimizer) not in ELEMENT_BY_ELEMENT:
        for group in optimizer.param_groups:
            if group["params"] and not _treats_elements_alone(optimizer, group):
                raise ValueError(
                    f"optimizer: {type(optimizer).__name__} is not supported, because its update of an element depends "
                    "on other elements. Use an optimizer that updates each element independently, such as AdamW."
                )


def _treats_elements_alone(optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the optimizer updates two pieces of a small matrix as it updates the full matrix."""
    start = torch.linspace(-1.0, 2.0, 24, device=group["params"][0].device)
    try:
        full = _updated(optimizer, group, start.view(4, 6), slice(0, 24))
        parts = [_updated(optimizer, group, start[here], here) for here in (slice(0, 9), slice(9, 24))]
    except Exception as error:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} is not supported, because it cannot update a part of a matrix "
            f"({error}). Use an optimizer that updates each element independently, such as AdamW."
        ) from error
    return torch.allclose(full, torch.cat(parts), rtol=1e-4, atol=1e-6)


def _updated(optimizer: optim.Optimizer, group: dict[str, Any], start: Tensor, here: slice) -> Tensor:
    """Update a trial parameter with initial values `start` by three steps of a copy of `optimizer`; return it flat.

    `start` contains the elements `here` of a matrix of 24 elements, each with a gradient that depends on its index.
    """
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    # Remove a learning rate scheduler's wrapper of `step`, which counts optimizer steps.
    vars(twin).pop("step", None)
    parameter = Parameter(start.clone())
    # With a learning rate of 0, the trial steps would not change the parameter.
    rate = {"lr": 0.01} if group.get("lr") == 0 else {}
    twin.param_groups = [{**group, **rate, "params": [parameter]}]
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    places = torch.arange(24, device=start.device)[here].view(start.shape)
    for step in range(3):
        parameter.grad = torch.sin((step + 1) * (places + 1.0)) * (places + 1)
        type(optimizer).step(twin)  # type: ignore[arg-type]
    return parameter.detach().flatten()


def check_clip(clip: float) -> None:
    """Raise `ValueError` unless `clip`, the maximum gradient norm, is finite and 0 or more."""
    if not (clip >= 0 and math.isfinite(clip)):
        raise ValueError(f"clip = {clip}: must be a positive norm, or 0 for no clipping.")


def check_narrow(module: nn.Module) -> None:
    """Raise `ValueError` for float64 parameters, which fp32 master weights would round."""
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float64:
            raise ValueError(
                f"module: {name} is float64, which bf16 training with fp32 master weights does not support. "
                'Call module.float() before repro.parallelize, or use precision = "fp32", which changes no dtype.'
            )


class UnchangedModuleCheck:
    """Detect parameters that were unfrozen, cast or moved after the creation of the buckets.

    Freezing a parameter afterwards is allowed: the parameter counts as unused, and the optimizer skips it.
    """

    def __init__(self, module: nn.Module, sharded: ShardedModule, optimizer: optim.Optimizer):
        self._named = dict(module.named_parameters())
        self._parameters = list(self._named.values())
        self._placed: Sequence[Tensor] = [] if sharded.sharding.stage == 3 else sharded.parameters
        self._required, self._places = self._now()
        vars(optimizer)["add_param_group"] = _add_param_group
        for copying in ("__deepcopy__", "__reduce_ex__"):
            vars(module)[copying] = _copy

    def _now(self) -> tuple[list[bool], list[int]]:
        with torch._C.DisableTorchFunctionSubclass():
            return [p.requires_grad for p in self._parameters], [p.data_ptr() for p in self._placed]

    def check(self) -> None:
        """Raise `RuntimeError` if a parameter was unfrozen, cast or moved, because the buckets lack the change."""
        required, places = self._now()
        if required != self._required:
            for name, now, before in zip(self._named, required, self._required, strict=True):
                if now and not before:
                    raise RuntimeError(
                        f"{name}.requires_grad: unfreezing after repro.parallelize is not supported. Let the parameter "
                        "require gradients during the call, and freeze it after the call."
                    )
        if places != self._places:
            raise RuntimeError(
                "module: casting or moving parameters after repro.parallelize (.to(), .double(), .data = ...) is not "
                "supported. Cast and move the module before the call, and set `precision` in the layout."
            )


def _add_param_group(group: dict[str, Any]) -> None:
    raise RuntimeError(
        "optimizer.add_param_group() after repro.parallelize is not supported. Add the group before the call."
    )


def _copy(*_: Any) -> None:
    raise RuntimeError(
        "A copy of a parallelized module is not supported. Copy the module before repro.parallelize and load "
        "module.repro.full_parameters() into the copy, or save full_parameters() or module.state_dict()."
    )
