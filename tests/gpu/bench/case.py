"""Cases of the benchmark: inputs of training's sizes, and implementations of the same work.

The bytes come from the operators' cost formulas (`repro.kernels.cost`) for all implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
    nbytes: Callable[[Inputs], int]
    ways: dict[str, Way]
    """Implementations by name; `torch.compile` of `eager` is implied."""

    def way(self, who: str) -> Way:
        """Return the implementation with one of `names`."""
        if who == COMPILED and who not in self.ways:
            return torch.compile(self.ways[EAGER])
        return self.ways[who]

    @property
    def names(self) -> list[str]:
        """Names of all implementations."""
        return [*self.ways, *([COMPILED] if EAGER in self.ways and COMPILED not in self.ways else [])]


def moved_bytes(name: str, *arguments: Any) -> int:
    """Return the bytes of one call of an operator."""
    price = cost(name, *arguments)
    return price.bytes_read + price.bytes_written


def random_tensor(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return normal random numbers."""
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
    nbytes: tuple[Callable[[Inputs], int], Callable[[Inputs], int]],
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

    ways = {who: backward(who) for who in [*forward, COMPILED]}
    return [
        BenchCase(name, goal, inputs, nbytes[0], dict(forward)),
        BenchCase(f"{name} backward", goal, inputs, nbytes[1], ways),
    ]
