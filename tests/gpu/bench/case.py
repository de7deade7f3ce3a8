"""Cases of the benchmark: inputs of training's sizes, and implementations of the same work.

The bytes come from the operators' cost formulas (`repro.kernels.cost`) for all implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from repro.kernels.families import cost

Inputs = dict[str, Any]
Way = Callable[[Inputs], Any]
KERNEL, PLAIN, EAGER, COMPILED = "kernel", "reference", "eager", "torch.compile"


@dataclass(frozen=True)
class BenchCase:
    """One kernel, or the forward or backward part of one."""

    name: str
    goal: float
    """Required share of a copy's bandwidth on an H200 or A100; 0 for no goal."""
    inputs: Callable[[torch.device, torch.dtype, int], Inputs]
    """Tensors for a device and dtype, `shrink` times smaller (1 on a GPU)."""
    ways: dict[str, Way]
    """Implementations by name; `torch.compile` of `eager` is implied."""
    count_bytes: Callable[[Inputs], int] | None = None
    """Bytes of one call; None for the bytes of all operators that the kernel's implementation calls."""

    def nbytes(self, inputs: Inputs) -> int:
        return (
            self.count_bytes(inputs) if self.count_bytes else moved_bytes(self.ways[KERNEL], on_meta(inputs))
        )

    def way(self, who: str) -> Way:
        """Return the implementation with one of `names`."""
        if who == COMPILED and who not in self.ways:
            return torch.compile(self.ways[EAGER])
        return self.ways[who]

    @property
    def names(self) -> list[str]:
        return [*self.ways, *([COMPILED] if EAGER in self.ways and COMPILED not in self.ways else [])]


def implementations(ours: Callable[[Inputs, bool], Any], eager: Way) -> dict[str, Way]:
    """Return the two implementations `ours(inputs, plain)` and an implementation with users' usual code, by name."""
    return {KERNEL: partial(ours, plain=False), PLAIN: partial(ours, plain=True), EAGER: eager}


class _MovedBytes(TorchDispatchMode):
    """Dispatch mode that adds up the bytes of the operators of `repro::`."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "repro":
            price = cost(str(func).removeprefix("repro."), *args)
            self.total += price.bytes_read + price.bytes_written
        return func(*args, **(kwargs or {}))


def moved_bytes(way: Way, inputs: Inputs) -> int:
    """Return the bytes of all operators of `repro::` in one call on tensors of the sizes of `inputs`."""
    with _MovedBytes() as found:
        way(inputs)
    return found.total


def on_meta(inputs: Inputs) -> Inputs:
    """Return tensors without data and with the sizes of `inputs`."""
    convert = lambda t: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)
    return tree_map_only(Tensor, convert, inputs)  # type: ignore[no-any-return]


def random_tensor(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def row_inputs(width: int) -> Callable[[torch.device, torch.dtype, int], Inputs]:
    """Return inputs x, residual, gradient [8, 1024, width] and vectors [width]; trained tensors require gradients."""

    def make(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
        shape = (8, max(4, 1024 // shrink), max(8, width // shrink))
        x, residual, grad = (random_tensor(device, dtype, *shape) for _ in range(3))
        weight, bias = (random_tensor(device, dtype, shape[-1]) for _ in range(2))
        for tensor in (x, residual, weight, bias):
            tensor.requires_grad_()
        return {"x": x, "residual": residual, "grad": grad, "weight": weight, "bias": bias, "seq": shape[1]}

    return make


Forward = Callable[[Inputs], Tensor]


def forward_and_backward(
    name: str,
    goal: float,
    inputs: Callable[[torch.device, torch.dtype, int], Inputs],
    leaves: tuple[str, ...],
    forward: dict[str, Forward],
) -> list[BenchCase]:
    """Return the forward case, and the backward case of a retained graph."""

    def backward(who: str) -> Callable[[Inputs], Any]:
        @cache
        def graph() -> Forward:  # at first use, because the compiler takes seconds to import
            return forward.get(who) or torch.compile(forward[EAGER])

        def run(i: Inputs) -> Any:
            if who not in i:
                i[who] = graph()(i)
            return torch.autograd.grad(i[who], [i[leaf] for leaf in leaves], i["grad"], retain_graph=True)

        return run

    def backward_bytes(i: Inputs) -> int:
        i = on_meta(i)
        return moved_bytes(backward(KERNEL), {**i, KERNEL: forward[KERNEL](i)})

    ways = {who: backward(who) for who in [*forward, COMPILED]}
    return [
        BenchCase(name, goal, inputs, dict(forward)),
        BenchCase(f"{name} backward", goal, inputs, ways, backward_bytes),
    ]
