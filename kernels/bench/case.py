"""A case: inputs of training's sizes, and ways to do the same work on them.

Its bytes are those of the operators' own formulas (`repro.kernels.cost`): operands read once, results written once,
whoever does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from repro.kernels.flops import cost

Inputs = dict[str, Any]
Way = Callable[[Inputs], Any]
OURS, PLAIN, EAGER, COMPILED = "kernel", "reference", "eager", "torch.compile"


@dataclass(frozen=True)
class Case:
    """One kernel, or the forward or backward part of one."""

    name: str
    goal: float
    """Part of a copy's bandwidth that is asked of it on an H200 or A100; 0: nothing is."""
    inputs: Callable[[torch.device, torch.dtype, int], Inputs]
    """Tensors for a device and dtype, `shrink` times smaller (1 on a GPU)."""
    nbytes: Callable[[Inputs], int]
    ways: dict[str, Way]
    """Who -> the work; `torch.compile` is made of `eager` where it is not there."""

    def way(self, who: str) -> Way:
        """The work by one of `names`."""
        if who == COMPILED and who not in self.ways:
            return torch.compile(self.ways[EAGER])
        return self.ways[who]

    @property
    def names(self) -> list[str]:
        """Who there is."""
        return [*self.ways, *([COMPILED] if EAGER in self.ways and COMPILED not in self.ways else [])]


def moved(name: str, *arguments: Any) -> int:
    """Bytes of one call of an operator."""
    price = cost(name, *arguments)
    return price.bytes_read + price.bytes_written


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, device=device).to(dtype)


def rows(width: int) -> Callable[[torch.device, torch.dtype, int], Inputs]:
    """x, residual, gradient [8, 1024, width] and vectors [width], those that are trained with gradients."""

    def make(device: torch.device, dtype: torch.dtype, shrink: int) -> Inputs:
        shape = (8, max(4, 1024 // shrink), max(8, width // shrink))
        x, residual, grad = (random(device, dtype, *shape) for _ in range(3))
        weight, bias = (random(device, dtype, shape[-1]) for _ in range(2))
        for tensor in (x, residual, weight, bias):
            tensor.requires_grad_()
        return {"x": x, "residual": residual, "grad": grad, "weight": weight, "bias": bias, "seq": shape[1]}

    return make


Forward = Callable[[Inputs], Tensor]


def both(
    name: str,
    goal: float,
    inputs: Callable[[torch.device, torch.dtype, int], Inputs],
    leaves: tuple[str, ...],
    forward: dict[str, Forward],
    nbytes: tuple[Callable[[Inputs], int], Callable[[Inputs], int]],
) -> list[Case]:
    """Forward with what it saves for backward, and backward of a graph that is kept."""

    def backward(who: str) -> Callable[[Inputs], Any]:
        @cache
        def graph() -> Forward:  # not before it is asked for: the compiler takes seconds to import
            return forward.get(who) or torch.compile(forward[EAGER])

        def run(i: Inputs) -> Any:
            if who not in i:
                i[who] = graph()(i)
            return torch.autograd.grad(i[who], [i[leaf] for leaf in leaves], i["grad"], retain_graph=True)

        return run

    ways = {who: backward(who) for who in [*forward, COMPILED]}
    return [
        Case(name, goal, inputs, nbytes[0], dict(forward)),
        Case(f"{name} backward", goal, inputs, nbytes[1], ways),
    ]
