"""Which implementation a call on CUDA tensors gets: the kernel, or torch's operators where it cannot be had.

The choice is never silent: every reason to fall back is told once, with what to do, and `ran()` says for the
record what ran. Who wants torch's operators asks for them where the operator is called (`plain`), not here.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from repro.kernels.cuda.device import device
from repro.kernels.cuda.program import Unavailable

CUDA = "cuda"

_ran: Counter[tuple[str, str]] = Counter()
_told: set[str] = set()


def ran() -> Counter[tuple[str, str]]:
    """(operator, `cuda` or `torch: <why>`) -> calls on CUDA tensors in this process so far.

    The numbers only grow: what an experiment called is the difference of two looks.
    """
    return _ran.copy()


def chooser(name: str, binding: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on CUDA tensors: `binding(launcher, *arguments)`, or `instead` where it is unavailable."""
    done = (name, CUDA)

    def call(*arguments: Any) -> Any:
        try:
            result = binding(device(_index(arguments)), *arguments)
        except Unavailable as error:
            _fall_back(name, str(error))
            return instead(*arguments)
        _ran[done] += 1
        return result

    return call


def _fall_back(name: str, why: str) -> None:
    _ran[name, f"torch: {why}"] += 1
    if why in _told:
        return
    _told.add(why)
    warnings.warn(
        f"repro::{name} runs torch's operators, not its CUDA kernel: {why}", RuntimeWarning, stacklevel=3
    )


def _index(arguments: tuple[Any, ...]) -> int:
    """The device of a call: that of its first tensor."""
    for argument in arguments:
        if isinstance(argument, list) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument.get_device()
    raise AssertionError("an operator without tensors")
