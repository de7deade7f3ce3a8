"""Results and gradients of an operator and of its fp64 reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Close = Callable[..., None]
"""Type of the fixture `close`."""


def with_gradients(function: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the function's result, and the gradients of all arguments."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def in_fp64(reference: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the reference's result in fp64, and the gradients of all arguments."""
    return with_gradients(reference, grad.double(), *(t.double() for t in tensors))


def assert_matches(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    grad: Tensor,
    tensors: list[Tensor],
    close: Close,
    roundings: int = 2,
) -> None:
    """Compare a function of tensors of one dtype, and its gradients, with the reference in fp64."""
    actual = with_gradients(function, grad, *tensors)
    for a, e in zip(actual, in_fp64(reference, grad, *tensors), strict=True):
        assert a.dtype == grad.dtype
        close(a, e, roundings)


def saved_for_backward(call: Callable[[], object]) -> list[Tensor]:
    """Return the tensors that autograd saves during a call."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved
