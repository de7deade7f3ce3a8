"""Stage 3: a parameter of which no rank has the values cannot be read by accident.

Its memory is gone while its shape remains, so an operator would read what is not there.  A parameter that is
released therefore changes its class for one that refuses operators, which costs 0.1 us; the tensor that
autograd knows stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def _methods(kind: str, *names: str) -> set[Callable[..., Any]]:
    return {getattr(getattr(Tensor, name), kind) for name in names}


HARMLESS: set[Callable[..., Any]] = {
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
"""What reads no values."""


class Released(Parameter):
    """A parameter without values: it has a shape and a gradient, and refuses everything else."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = f".{getattr(func, '__self__', func).__name__}"
        shape = next((tuple(a.size()) for a in args if isinstance(a, Released)), ())
        raise RuntimeError(
            f"{name} of a parameter {list(shape)}: under zero = 3 its values exist only "
            "while its module's forward and backward run; call module.repro.full_parameters() on all ranks"
        )


@cache
def _released(kind: type[Parameter]) -> type[Parameter]:
    return Released if kind is Parameter else type(f"Released{kind.__name__}", (Released, kind), {})


class Guard:
    """Parameters that are gathered and released together."""

    def __init__(self, parameters: Iterable[Parameter]):
        self._kinds = [(p, type(p), _released(type(p))) for p in parameters]
        self.close()

    def open(self) -> None:
        """The values are there."""
        for parameter, kind, _ in self._kinds:
            parameter.__class__ = kind  # type: ignore[assignment]

    def close(self) -> None:
        """They are gone."""
        for parameter, _, released in self._kinds:
            parameter.__class__ = released  # type: ignore[assignment]
