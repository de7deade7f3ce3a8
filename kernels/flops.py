"""FLOPs and bytes of every `repro::` operator, for the simulator and for torch's FlopCounterMode.

The formulas sit beside the kernels; each docstring says what is counted per element. They count what any
implementation must do (operands read once, results written once), not what today's implementation does.
Integer work (random bits, indices) is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from repro.kernels import adamw, cross_entropy, dropout, gelu, glu, layernorm, norm, rmsnorm, rope, softmax
from repro.kernels.library import Cost, Operand

FORMULAS: dict[str, Callable[..., Cost]] = {
    "layer_norm": layernorm.forward_cost,
    "layer_norm_backward": layernorm.backward_cost,
    "rms_norm": rmsnorm.forward_cost,
    "rms_norm_backward": rmsnorm.backward_cost,
    "bias_gelu": gelu.forward_cost,
    "bias_gelu_backward": gelu.backward_cost,
    "swiglu": glu.forward_cost,
    "swiglu_backward": glu.backward_cost,
    "rotary": rope.cost,
    "bias_dropout_residual": dropout.forward_cost,
    "bias_dropout_residual_backward": dropout.backward_cost,
    "causal_softmax": softmax.forward_cost,
    "causal_softmax_backward": softmax.backward_cost,
    "cross_entropy_max": cross_entropy.max_cost,
    "cross_entropy_sums": cross_entropy.sums_cost,
    "cross_entropy_backward_": cross_entropy.gradient_cost,
    "adamw_": adamw.cost,
    "norm_squared": norm.cost,
}
"""Operator name without `repro::` -> formula over the operator's own arguments, in their order."""


def _operand(argument: Any, itemsize: int) -> Any:
    if isinstance(argument, Tensor):
        return Operand(tuple(argument.shape), argument.element_size())
    if isinstance(argument, tuple):
        return Operand(argument, itemsize)
    if isinstance(argument, list):
        return [_operand(item, itemsize) for item in argument]
    return argument


def cost(name: str, *arguments: Any, itemsize: int = 4) -> Cost:
    """(flops, bytes_read, bytes_written) of one call of `repro::<name>`.

    The arguments are the operator's own, in the order of its schema. A tensor (meta will do) stands for
    itself; a *tuple* of sizes stands for a tensor with `itemsize` bytes per element; a list stands for a
    list of tensors. Trailing arguments that are not tensors may be left out. Raises ValueError for an
    unknown name.
    """
    short = name.removeprefix("repro::").removesuffix(".default")
    if short not in FORMULAS:
        raise ValueError(f"no operator repro::{short}; there are {', '.join(sorted(FORMULAS))}")
    return FORMULAS[short](*(_operand(argument, itemsize) for argument in arguments))


def _formula(name: str) -> Callable[..., int]:
    def flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        return cost(name, *arguments).flops

    return flops


for _name in FORMULAS:
    register_flop_formula(getattr(torch.ops.repro, _name), get_raw=True)(_formula(_name))
