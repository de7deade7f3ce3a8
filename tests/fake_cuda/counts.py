"""Counts of a step's kernel launches, device allocations and non-tensor arguments.

Each launch of a `repro` kernel and each call of a torch operator counts once. Views and empty tensors do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor

from tests.races.device import EMPTY, described


@dataclass
class Pass:
    """Counts of one pass, such as the forward of one micro-batch."""

    phase: str
    launches: Counter[str] = field(default_factory=Counter)
    """Number of launches, by operator or by kernel source and kernel name."""
    allocations: Counter[int] = field(default_factory=Counter)
    """Number of allocations, by size in bytes."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Operators and launches in order, with all arguments except tensor contents, as in a captured graph."""

    def changed_calls(self, other: Pass) -> list[str]:
        """Return the names of calls that differ from the calls of another pass."""
        pairs = zip_longest(self.calls, other.calls)
        return sorted({str((ours or theirs)[0]) for ours, theirs in pairs if ours != theirs})  # type: ignore[index]


class Counts:
    """Counts of the passes of a step, in order."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.begin_pass("")

    def begin_pass(self, phase: str) -> None:
        """Begin the counts of another pass."""
        self.passes.append(Pass(phase))

    def add_kernel(self, name: str, arguments: Any) -> None:
        """Count a launch of a `repro` kernel."""
        self.passes[-1].launches[name] += 1
        self.passes[-1].calls.append((name, arguments))

    def add_operator(self, func: Any, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        """Count a call of a torch operator."""
        operator = described(func)
        values = (*arguments, *results)
        self.passes[-1].calls.append((operator.name, [_static_value(each) for each in values]))
        if operator.view or func.namespace == "prim" or not any(_on_device(each) for each in values):
            return
        if operator.name not in EMPTY:
            self.passes[-1].launches[operator.name.removeprefix("aten.")] += 1
        if not operator.writes:
            sizes = [each.untyped_storage().nbytes() for each in results if _on_device(each)]
            self.passes[-1].allocations.update(size for size in sizes if size)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _static_value(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
