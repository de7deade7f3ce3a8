"""Which kernels an experiment's steps called on this rank: CUDA kernels, or torch's operators and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from repro.kernels import ran

EVERY = "every operator"
"""Stands for all where there is no choice: on a CPU, or under `kernels = "reference"`."""


class KernelTally:
    """Counts the calls of one experiment in a process where several may take turns."""

    def __init__(self, device_type: str, *, plain: bool):
        """`plain`: the layout asks for torch's operators."""
        self._otherwise = "torch: kernels = reference" if plain else f"torch: on {device_type}"
        self._calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What is called meanwhile is this experiment's."""
        before = ran()
        try:
            yield
        finally:
            self._calls += ran() - before

    def as_dict(self) -> dict[str, list[str]]:
        """Operator -> `cuda`, `torch: why`, or both where not all calls went one way."""
        found: dict[str, list[str]] = {}
        for name, how in sorted(self._calls):
            found.setdefault(name, []).append(how)
        return found or {EVERY: [self._otherwise]}
