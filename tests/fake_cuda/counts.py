"""What a step asks of a device: kernels, memory, and what the host tells it beside tensors.

A kernel of the suite's counts where it is launched, an operator of torch's once a call, although some are several
kernels (backward of attention is three).  What only views, and what only allocates, launches nothing.
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
    """A phase of a step, as often as it comes."""

    phase: str
    launches: Counter[str] = field(default_factory=Counter)
    """By operator, or by source and kernel."""
    allocations: Counter[int] = field(default_factory=Counter)
    """How often memory was asked for, by bytes."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Every operator and launch in order, with all that is no tensor's contents: what a captured graph would hold."""

    def differs(self, other: Pass) -> list[str]:
        """The calls of which another pass has others."""
        pairs = zip_longest(self.calls, other.calls)
        return sorted({str((mine or others)[0]) for mine, others in pairs if mine != others})  # type: ignore[index]


class Counts:
    """The passes of a step, one after another."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.begins("")

    def begins(self, phase: str) -> None:
        """Another pass."""
        self.passes.append(Pass(phase))

    def kernel(self, name: str, arguments: Any) -> None:
        """A kernel of ours is launched."""
        self.passes[-1].launches[name] += 1
        self.passes[-1].calls.append((name, arguments))

    def operator(self, func: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        """One of torch's has been called."""
        what = described(func)
        self.passes[-1].calls.append((what.name, [_told(each) for each in (*given, *made)]))
        if what.view or func.namespace == "prim" or not any(_on_device(each) for each in (*given, *made)):
            return
        if what.name not in EMPTY:
            self.passes[-1].launches[what.name.removeprefix("aten.")] += 1
        if not what.writes:
            sizes = [each.untyped_storage().nbytes() for each in made if _on_device(each)]
            self.passes[-1].allocations.update(size for size in sizes if size)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _told(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
