"""`torch.amp.GradScaler` on gradients that are cut: all ranks unscale alike, and all skip a step where one must.

A scaler divides the gradients of the optimizer's parameters, each of which is a rank's piece here, and notes whether
one is not finite: a rank would see its own piece only.  It does so by one operator on whatever it finds at `grad`, so
one of the pieces gets there a tensor that stands for all of them (as `DTensor` answers this operator for FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from repro.parallel.comm import MAX, Group
from repro.parallel.zero.stage3_checks import METADATA_FUNCTIONS
from repro.wrap.optimizer_states import Shard


class GradientOfOptimizer(Tensor):
    """What is at `grad` of an optimizer's parameter between backward pass and step: to unscale, and nothing else."""

    unscale: Callable[[Tensor, Tensor], None]

    @staticmethod
    def of(parameter: Tensor, unscale: Callable[[Tensor, Tensor], None]) -> GradientOfOptimizer:
        """`unscale(found_inf, inv_scale)`: both 0-dim fp32; sets the first to 1 if any gradient is not finite."""
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            GradientOfOptimizer, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.unscale = unscale
        found: GradientOfOptimizer = made
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            (mine,), found_inf, inv_scale = args
            return mine.unscale(found_inf, inv_scale)
        return cls.__torch_dispatch__(func, types)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}() of the gradient of a parameter in the optimizer, which is a piece of "
            "the module's: use module.parameters(), as in clip_grad_norm_(module.parameters(), ...)"
        )


class LossScaling:
    """Shows the optimizer's first parameter such a gradient."""

    def __init__(self, shards: Sequence[Shard], group: Group | None, before: Callable[[], None]):
        """`group`: the ranks that have other pieces, if any; `before` is called before gradients are divided."""
        self._group, self._before = group, before
        self._of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for shard in shards:
            self._of_dtype.setdefault(shard.gradient.dtype, []).append(shard.gradient)
        self._first = shards[0].parameter
        self._gradient = GradientOfOptimizer.of(self._first, self._unscale)

    def show(self) -> None:
        """There are gradients."""
        self._first.grad = self._gradient

    def hide(self) -> None:
        """There are none."""
        self._first.grad = None

    def _unscale(self, found_inf: Tensor, inv_scale: Tensor) -> None:
        if torch.float16 in self._of_dtype:
            raise ValueError(
                "GradScaler: fp16 gradients would underflow; keep the module in fp32, under autocast"
            )
        self._before()
        for gradients in self._of_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        if self._group is not None:
            self._group.all_reduce(found_inf, MAX, purpose="overflow").wait()
