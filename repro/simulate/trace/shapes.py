"""Cache of operator results on `meta` tensors. Layers and micro-batches repeat the same operator calls, and torch's
shape functions, many of them in Python, take most of the time of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
UNKNOWN_RESULT = object()
PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Types of operands whose values are part of an operator call's cache key."""
CallKey = tuple[object, ...]
"""Key of an operator call: the operator, and all properties of its operands on which its result and cost can depend."""


def cached_by_operator(describe: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorate `describe(operator)` with a cache by the operator's `id()`, because hashing an operator is slower."""
    known: dict[int, T] = {}

    def found(func: Any) -> T:
        try:
            return known[id(func)]
        except KeyError:
            return known.setdefault(id(func), describe(func))

    return found


class ShapeCache:
    """Cache that runs an operator once for each `CallKey`. Further calls return `meta` tensors of the same shapes."""

    def __init__(self) -> None:
        self._known: dict[CallKey, Any] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: CallKey | None) -> Any:
        """Return the result of the operator call `func(*args, **kwargs)` (no view), from the cache if it has `key`."""
        out = output_argument(func, kwargs)
        if out is not None:
            return out
        if _in_place(func):
            return args[0]
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key, UNKNOWN_RESULT)
        if known is not UNKNOWN_RESULT:
            return _made(known)
        found = func(*args, **kwargs)
        self._known[key] = _shape(found)
        if self._known[key] is UNKNOWN_RESULT:
            del self._known[key]
        return found


def call_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKey | None:
    """Return the `CallKey` of an operator call; None if an operand has a type that the cache does not support."""
    operands = [_described(value) for value in (*args, *kwargs.values())]
    return None if UNKNOWN_RESULT in operands else (id(func), len(args), tuple(kwargs), *operands)


def output_argument(func: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a caller passes for an operator's result (such as `out=`); None without one."""
    name = _out_argument(func)
    return None if name is None else kwargs.get(name)


@cached_by_operator
def _out_argument(func: Any) -> str | None:
    """Return the name of an operator's only output argument, usually `out`; None if it has none or several."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    return names[0] if len(names) == 1 else None


@cached_by_operator
def _in_place(func: Any) -> bool:
    """Return whether an operator modifies only its first argument, whose size is constant, and returns it."""
    schema = func._schema
    if len(schema.returns) != 1 or not schema.arguments or not schema.name.startswith("aten::"):
        return False
    if schema.name in ("aten::resize_", "aten::set_"):
        return False
    first, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
    if first is None or returned is None:
        return False
    return bool(first.is_write and returned.is_write and first.before_set == returned.before_set)


def _described(value: Any) -> Any:
    """Return all properties of an operand on which a result's shape can depend; `UNKNOWN_RESULT` for other types."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return UNKNOWN_RESULT
        return (Tensor, value.shape, value.stride(), value.dtype)
    if type(value) in PLAIN:
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        inside = tuple(_described(entry) for entry in value)
        return UNKNOWN_RESULT if UNKNOWN_RESULT in inside else (type(value), inside)
    return UNKNOWN_RESULT


def _shape(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        spanned = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1
        exact = value.numel() and value.untyped_storage().nbytes() == spanned * value.element_size()
        plain = type(value) is Tensor and value.device.type == "meta"
        return (value.shape, value.stride(), value.dtype) if exact and plain else UNKNOWN_RESULT
    if isinstance(value, tuple):
        inside = tuple(_shape(entry) for entry in value)
        return UNKNOWN_RESULT if UNKNOWN_RESULT in inside else (tuple, inside)
    return UNKNOWN_RESULT


def _made(known: Any) -> Any:
    if known is None:
        return None
    if known[0] is tuple:
        return tuple(_made(entry) for entry in known[1])
    shape, stride, dtype = known
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
