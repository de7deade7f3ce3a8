"""Which implementation a call on CUDA tensors gets: the kernel, or torch's operators where it cannot be had.

The choice is never silent: the first fallback of an operator warns with the reason and what to do, and
`used()` says for the record what ran.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from repro.kernels.cuda.device import device
from repro.kernels.cuda.program import Unavailable
from repro.kernels.library import LIBRARY

SWITCH = "REPRO_KERNELS"
"""The variable that chooses torch's operators instead (`torch`), to measure what the kernels bring."""

_used: dict[str, str] = {}


def used() -> dict[str, str]:
    """Operator -> `cuda`, or `torch: <why>`, for all that were called on CUDA tensors in this process."""
    return dict(_used)


def use(name: str, binding: Callable[..., Any], instead: Callable[..., Any]) -> None:
    """Register `binding(launcher, *arguments)` for CUDA tensors, with `instead` where it is unavailable."""
    LIBRARY.impl(name, chooser(name, binding, instead), "CUDA")


def chooser(name: str, binding: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """What `use` registers."""

    def call(*arguments: Any) -> Any:
        try:
            if os.environ.get(SWITCH) == "torch":
                raise _Declined(f"{SWITCH}=torch")
            result = binding(device(_index(arguments)), *arguments)
        except Unavailable as error:
            _note(name, error)
            return instead(*arguments)
        _used.setdefault(name, "cuda")
        return result

    return call


class _Declined(Unavailable):
    """The user has asked for torch's operators."""


def _note(name: str, error: Unavailable) -> None:
    reason = f"torch: {error}"
    if _used.get(name) == reason:
        return
    _used[name] = reason
    if not isinstance(error, _Declined):
        warnings.warn(
            f"repro::{name} runs torch's operators, not its CUDA kernel: {error}",
            RuntimeWarning,
            stacklevel=3,
        )


def _index(arguments: tuple[Any, ...]) -> int:
    """The device of a call: that of its first tensor."""
    for argument in arguments:
        if isinstance(argument, list) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return torch.cuda.current_device() if argument.device.index is None else argument.device.index
    raise AssertionError("an operator without tensors")
