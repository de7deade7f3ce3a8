"""Live bytes by category, watched storage by storage.

A dispatch mode sees every tensor that an operator returns and notes its storage until it is freed, so the
numbers are those of real allocations, whoever made them.  What is for parameters, gradients, optimizer
states, checkpoints and communication says so itself (`repro.parallel.storage`); of the rest, what the
forward pass allocates is activations.  Bytes are those of storages: a view costs nothing, an allocator's
rounding is not counted, and temporaries inside one operator are not seen.  Totals are the device's: what
lies in host memory is a category of its own and no part of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from repro.config.enums import ACCOUNTED, Category, Phase
from repro.measure.uncompiled import UncompiledMode, wrapped
from repro.parallel import storage

_Seen = tuple["weakref.ref[torch.UntypedStorage]", Category]
"""A storage, and the category that it has if it has no mark."""


class MemoryTracker(UncompiledMode):
    """Use as a context manager around initialisation and steps; `phase` is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.INIT
        """`forward` makes unmarked storages activations; other phases make them `other`."""
        self._live: dict[int, _Seen] = {}
        self._now = self._nothing()
        """Bytes by category after the last operator."""
        self._newborn: list[tuple[_Seen, Category, int]] = []
        """Storages that it made, with the category under which `_now` counts them and their bytes."""
        self._now_phase = self.phase
        self._peak, self._most, self._peak_phase = self._nothing(), self._nothing(), ""

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at the moment when the device's total was largest."""
        self._judge()
        return dict(self._peak)

    @property
    def peak_phase(self) -> str:
        """The phase in which that was."""
        self._judge()
        return self._peak_phase

    @property
    def most(self) -> dict[str, int]:
        """The most bytes of each category at any moment, and of the device's total."""
        self._judge()
        return dict(self._most)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if wrapped(types):
            return NotImplemented
        self._judge()
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        self._now, self._now_phase = self.live(), self.phase
        return out

    def live(self) -> dict[str, int]:
        """Bytes that are live now, by category, and the device's total."""
        found = self._nothing()
        for reference, born in list(self._live.values()):
            live = reference()
            if live is not None:
                # Parameters are released and restored without an operator (ZeRO 3): ask each time.
                category = storage.category_of(live) or born
                if category != Category.SHAPE:
                    found[category] += live.nbytes()
        return _with_total(found)

    def largest(self, category: Category) -> int:
        """Bytes of the largest live storage of a category."""
        sizes = [
            s.nbytes()
            for r, _ in list(self._live.values())
            if (s := r()) and storage.category_of(s) == category
        ]
        return max(sizes, default=0)

    @staticmethod
    def _nothing() -> dict[str, int]:
        return dict.fromkeys(("total", *ACCOUNTED), 0)

    def _judge(self) -> None:
        """Compare the moment after the last operator with the peaks.

        Not at once, since a new storage gets its mark just after the operator that made it.
        """
        for (reference, _), counted_as, size in self._newborn:
            live = reference()
            category = None if live is None else storage.category_of(live)
            if category is not None and category != counted_as:
                if counted_as != Category.SHAPE:
                    self._now[counted_as] -= size
                if category != Category.SHAPE:
                    self._now[category] += size
        if self._newborn:
            self._newborn.clear()
            _with_total(self._now)
        if self._now["total"] > self._peak["total"]:
            self._peak, self._peak_phase = dict(self._now), self._now_phase
        most = self._most
        for name, size in self._now.items():
            if size > most[name]:
                most[name] = size

    def _see(self, seen: torch.UntypedStorage) -> None:
        key = seen._cdata
        if key in self._live:
            return
        born = Category.ACTIVATIONS if self.phase == Phase.FORWARD else Category.OTHER
        if seen.device.type == "meta":
            # A model before it is sharded, or what DTensor tries operators out on (fake tensors).
            born = Category.SHAPE

        def forget(_: object) -> None:
            self._live.pop(key, None)

        entry = (weakref.ref(seen, forget), born)
        self._live[key] = entry
        self._newborn.append((entry, storage.category_of(seen) or born, seen.nbytes()))


def _with_total(found: dict[str, int]) -> dict[str, int]:
    """Sum the device's categories under `total`."""
    found["total"] = 0
    found["total"] = sum(found.values()) - found[Category.HOST]
    return found
