"""Operator calls of a training step, which are recorded in a trace of shapes and repeated on real tensors.

Bytes and FLOP of a call are those of the trace, so that calibration and prediction count them equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from repro import kernels
from repro.config import Experiment
from repro.simulate.time.device import MATMULS, is_unaligned
from repro.simulate.trace.events import Operator
from repro.simulate.trace.recorder import TraceRecorder
from repro.simulate.trace.roles import roles, trace
from repro.simulate.trace.shapes import call_key

POSITIVE_ARGUMENTS = {
    "aten.div": (1,),
    "aten.log": (0,),
    "aten.reciprocal": (0,),
    "aten.rsqrt": (0,),
    "aten.sqrt": (0,),
    "repro.adamw_": (3,),
    "repro.cross_entropy_backward_": (2,),
}
"""Positions of operator arguments that are positive in training, such as divisors, radicands and second moments."""
ATTENTION = "aten._scaled_dot_product_flash_attention"


@dataclass(frozen=True)
class OperandShape:
    """Sizes, strides and data type of a tensor that is an argument of an operator."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """Return the number of elements from the first to the last element of the tensor in memory."""
        if 0 in self.sizes:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True))


@dataclass(frozen=True)
class Call:
    """One call of an operator: arguments, with an `OperandShape` for each tensor, and the event in the trace."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operator: Operator

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def is_unaligned_product(self) -> bool:
        """Return whether the call is a half-precision matrix product with a size that is not a multiple of 8."""
        return self.name in MATMULS and is_unaligned(self.operator)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that the operator call reads and writes."""
        return self.operator.read + self.operator.written


class CallRecorder(TraceRecorder):
    """Trace recorder that also stores the arguments of every distinct operator call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[object, Call] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = call_key(func, args, kwargs)
        if key in self.calls:
            return super().__torch_dispatch__(func, types, args, kwargs)
        shapes = tree_map(_shape_of, args), tree_map(_shape_of, kwargs)
        before = len(self.events)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.events) > before and isinstance(last := self.events[-1], Operator):
            self.calls.setdefault(key or f"{func} {shapes}", Call(func, *shapes, last))
        return out


def calls_of(experiment: Experiment, *, gloo: bool) -> list[Call]:
    """Return the distinct operator calls of all pipeline roles (stages with equal work), in order of first call."""
    found: dict[object, Call] = {}
    for role in roles(experiment):
        recorder = CallRecorder()
        # With `repeat=False`, every block calls its operators. Otherwise, the trace copies the events of equal blocks.
        trace(experiment, role, gloo=gloo, recorder=recorder, repeat=False)
        found |= recorder.calls
    return list(found.values())


def choose(calls: Sequence[Call], most: int) -> list[Call]:
    """Return at most `most` calls of one operator: the smallest, the largest, and calls far from all chosen calls.

    The distance of two calls compares logarithms of bytes, FLOP and operand sizes.
    """

    def point(call: Call) -> tuple[float, ...]:
        sizes = [size for shape in call.operator.shapes[:2] for size in shape]
        return tuple(math.log2(1 + x) for x in (call.nbytes, call.operator.flops, *sizes))

    def distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
        return sum(abs(x - y) for x, y in zip(a, b, strict=False))

    rest = {point(call): call for call in sorted(calls, key=lambda call: call.nbytes)}
    if len(rest) <= most:
        return list(rest.values())
    points = list(rest)
    chosen = [points[0], points[-1]][:most]
    while len(chosen) < most:
        chosen.append(max(points, key=lambda p: min(distance(p, other) for other in chosen)))
    return [rest[p] for p in sorted(chosen)]


def bind(call: Call, device: torch.device, generator: torch.Generator) -> Callable[[], object]:
    """Return a function without arguments that repeats a recorded operator call on new tensors."""
    if call.name.startswith(ATTENTION):
        return _attention(call, device, generator)

    def real(value: Any) -> Any:
        if isinstance(value, OperandShape):
            return _tensor(value, device, generator, _index_bound(call))
        return device if isinstance(value, torch.device) else value

    args, kwargs = tree_map(real, (call.args, call.kwargs))
    for position in POSITIVE_ARGUMENTS.get(call.name, ()):
        tree_map_only(Tensor, Tensor.abs_, args[position])
    if call.name == "repro.adamw_" and args[-1] is not None:
        args[-1].zero_()  # With `found_inf` = 1, AdamW would skip the measured update.
    return lambda: call.function(*args, **kwargs)


def _attention(call: Call, device: torch.device, generator: torch.Generator) -> Callable[[], object]:
    """Return a function that repeats a recorded attention call; this device may run another kernel than recorded."""
    backward = call.name.endswith("_backward")
    shapes = call.args[1:4] if backward else call.args[:3]
    q, k, v = (_tensor(shape, device, generator).requires_grad_(backward) for shape in shapes)
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return kernels.causal_attention(q, k, v)

        return forward
    out = kernels.causal_attention(q, k, v)
    gradient = _tensor(call.args[0], device, generator)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _index_bound(call: Call) -> int:
    """Return the exclusive upper bound of a call's integer arguments, which are indices."""
    if call.name == "aten.embedding":
        return int(call.args[0].sizes[0])
    if call.name == "aten.embedding_dense_backward":
        return int(call.args[2])
    if call.name.startswith("repro.cross_entropy"):
        return int(call.args[0].sizes[-1])
    return 2


def _tensor(shape: OperandShape, device: torch.device, generator: torch.Generator, below: int = 2) -> Tensor:
    """Return a tensor of normally distributed numbers, as in training; integers are uniform below `below`.

    The values matter: the power of a matrix product, and so the clock rate of a GPU, depends on its operands.
    """
    flat = torch.empty(shape.extent, dtype=shape.dtype, device=device)
    if shape.dtype.is_floating_point:
        flat.normal_(generator=generator) if shape.sizes else flat.fill_(1.0)
    else:
        flat.random_(0, below, generator=generator)
    return flat.as_strided(shape.sizes, shape.strides)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return OperandShape(tuple(value.shape), value.stride(), value.dtype)
    return value
