"""Checks of ZeRO stage 3 for a user's module: reads of freed parameters, and ranks that gather different units.

An operator on a freed parameter would read released memory, so the parameter gets a class that refuses operators. If
the modules that a rank uses depend on its data, an all-gather could mix shards of different blocks. Every gather of a
forward pass therefore compares its unit's index over the ranks. The end of the pass compares a digest of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.parallel.comm import Group, Work


def _methods(kind: str, *names: str) -> set[Callable[..., Any]]:
    return {getattr(getattr(Tensor, name), kind) for name in names}


METADATA_FUNCTIONS: set[Callable[..., Any]] = {
    *_methods("__get__", "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim"),
    *_methods("__get__", "grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "_version"),
    *_methods("__get__", "nbytes", "itemsize", "_backward_hooks", "is_nested"),
    *_methods("__set__", "grad", "requires_grad", "_backward_hooks"),
    *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.ndimension, Tensor.element_size),
    *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.get_device, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel),
    *(
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
    ),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_),
}
"""Functions and attributes of a tensor that read only metadata (shape, dtype), and are allowed on freed parameters."""


class FreedParameter(Parameter):
    """Parameter whose memory ZeRO stage 3 has freed. It has a shape and gradient, but refuses operators."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name in ("backward", "grad"):
            raise RuntimeError(
                f"{name}() for given parameters is not supported under zero = 3. Call loss.backward() without inputs, "
                "and freeze all other parameters by requires_grad_(False) before the forward pass."
            )
        if name in ("__get__", "__set__"):
            name = f".{getattr(func, '__self__', func).__name__}"
        shape = next((tuple(a.size()) for a in args if isinstance(a, FreedParameter)), ())
        raise RuntimeError(
            f"{name} of a parameter of shape {list(shape)} is not supported under zero = 3, because its values "
            "exist only during the passes of its module. Call module.repro.full_parameters() on all ranks."
        )


@cache
def _freed_class(kind: type[Parameter]) -> type[Parameter]:
    return FreedParameter if kind is Parameter else type(f"Freed{kind.__name__}", (FreedParameter, kind), {})


class FreedParameterGuard:
    """Switch the Python class of jointly gathered parameters, so that reads of freed parameters raise an error."""

    def __init__(self, parameters: Iterable[Parameter]):
        self._kinds = [(p, type(p), _freed_class(type(p))) for p in parameters]
        self.refuse_reads()

    def allow_reads(self) -> None:
        """Restore the original Python class of parameters whose values have been gathered."""
        for parameter, kind, _ in self._kinds:
            parameter.__class__ = kind  # type: ignore[assignment]

    def refuse_reads(self) -> None:
        """Change the Python class of parameters with freed values to a class that refuses operators."""
        for parameter, _, freed in self._kinds:
            parameter.__class__ = freed  # type: ignore[assignment]


class UnitAgreement:
    """Check that all ranks of a gloo group gather equal units of ZeRO stage 3, by comparing unit indices."""

    def __init__(self, group: Group):
        self.group = group
        self._last_pass = Work()

    def compare(self, number: int) -> Work:
        """Compare a number (unit index or digest) over ranks; the result's `wait` raises `RuntimeError` if unequal."""
        if self.group.size == 1:
            return Work()
        own = torch.tensor([number])
        all_ranks = own.repeat(self.group.size)
        work = self.group.all_gather(all_ranks, own, purpose="agreement")

        def check() -> None:
            work.wait()
            if all_ranks.tolist() != [number] * self.group.size:
                raise RuntimeError(DIFFERENT_MODULES)

        return Work(finish=check)

    def union(self, flags: Sequence[bool]) -> list[bool]:
        """Return the element-wise OR of all ranks' `flags`, exact for the last 60 flags; earlier elements are True."""
        if self.group.size == 1:
            return list(flags)
        sent = flags[-60:]
        own = torch.tensor([FLAGS_BIT | sum(1 << i for i, flag in enumerate(sent) if flag)])
        all_ranks = own.repeat(self.group.size)
        self.group.all_gather(all_ranks, own, purpose="agreement").wait()
        if not all(number & FLAGS_BIT and number > 0 for number in all_ranks.tolist()):
            raise RuntimeError(DIFFERENT_MODULES)
        found = [any(number >> i & 1 for number in all_ranks.tolist()) for i in range(len(sent))]
        return [True] * (len(flags) - len(sent)) + found

    def end_forward(self, units: Sequence[int], has_gradients: bool) -> None:
        """Send a digest of the gather units that a forward pass used. `wait` compares the digests of all ranks."""
        # A negative number cannot equal a unit's index or a set of flags, which ranks also exchange and which are not
        # negative. Python's hash of integers is equal in every process, so ranks can compare it.
        self._last_pass = self.compare(-1 - abs(hash((has_gradients, *units))))

    def wait(self) -> None:
        """Raise `RuntimeError` unless all ranks used the same modules (gather units) in their last forward passes."""
        self._last_pass.wait()


FLAGS_BIT = 1 << 60
"""Bit that marks a number sent between ranks as a set of flags, which are the lower bits."""

DIFFERENT_MODULES = (
    "Ranks that use different modules in a pass, or run different numbers of passes, are not supported under zero = 3. "
    "Run every module on every rank, with empty input if necessary, or use zero = 2."
)
