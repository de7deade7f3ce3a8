"""Live bytes by category, watched storage by storage.

A dispatch mode sees every tensor that an operator returns and notes its storage until it is freed, so the
numbers are those of real allocations, whoever made them.  What is for parameters, gradients, optimizer
states and communication says so itself (:mod:`repro.parallel.storage`); of the rest, what the forward
pass allocates is activations.  Bytes are those of storages: a view costs nothing, an allocator's rounding
is not counted, and temporaries inside one operator are not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from repro.parallel import storage


class MemoryTracker(TorchDispatchMode):
    """Use as a context manager around initialisation and steps; ``phase`` is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "init"
        """``forward`` makes unmarked storages activations; other phases make them ``other``."""
        self.peak = dict.fromkeys(("total", *storage.CATEGORIES), 0)
        """Bytes by category at the moment when the total was largest."""
        self.peak_phase = ""
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
        self._bytes: dict[int, int] = {}
        self._total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        self.sample()
        return out

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak = dict.fromkeys(self.peak, 0)
        self.sample()

    def sample(self) -> None:
        """Compare what is live with the peak; called after every operator."""
        for key, (reference, _) in list(self._live.items()):
            live = reference()
            # Parameters are released and restored without an operator (ZeRO 3).
            if live is not None and storage.category_of(live) == storage.PARAMETERS:
                size = live.nbytes()
                self._total += size - self._bytes[key]
                self._bytes[key] = size
        # On a tie again: a new storage gets its mark just after the operator that made it.
        if self._total >= self.peak["total"]:
            self.peak = self.live()
            self.peak_phase = self.phase

    def live(self) -> dict[str, int]:
        """Bytes that are live now, by category, and their total."""
        found = dict.fromkeys(self.peak, 0)
        for reference, born in list(self._live.values()):
            live = reference()
            if live is not None:
                found[storage.category_of(live) or born] += live.nbytes()
        found["total"] = sum(found.values())
        return found

    def largest(self, category: str) -> int:
        """Bytes of the largest live storage of a category."""
        sizes = [
            s.nbytes()
            for r, _ in list(self._live.values())
            if (s := r()) and storage.category_of(s) == category
        ]
        return max(sizes, default=0)

    def _see(self, seen: torch.UntypedStorage) -> None:
        key = seen._cdata
        if key in self._live:
            return
        born = storage.ACTIVATIONS if self.phase == "forward" else storage.OTHER

        def forget(_: object) -> None:
            self._live.pop(key, None)
            self._total -= self._bytes.pop(key, 0)

        self._live[key] = (weakref.ref(seen, forget), born)
        self._bytes[key] = seen.nbytes()
        self._total += seen.nbytes()
