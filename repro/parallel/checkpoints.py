"""Activation checkpoints: what forward keeps for recomputation (1910.02054 sec. 3.2, 6.1)."""

from __future__ import annotations

from torch import Tensor

from repro.config import Layout
from repro.parallel import storage
from repro.parallel.comm import Group


class Saved:
    """One checkpoint between :meth:`Checkpoints.save` and :meth:`Checkpoints.load`."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor


class Checkpoints:
    """The checkpoints of one engine."""

    def __init__(self, layout: Layout, tp: Group, capacity: int):
        self.layout, self.tp, self.capacity = layout, tp, capacity

    def save(self, x: Tensor) -> Saved:
        """Keep a block's input x [b, s, h] (sp: [b, s/t, h])."""
        return Saved(storage.mark(x.detach(), storage.CHECKPOINTS))

    def load(self, saved: Saved) -> Tensor:
        """The block's input, once."""
        tensor, saved.tensor = saved.tensor, None
        if tensor is None:
            raise RuntimeError("a block's backward pass ran a second time; its checkpoint is gone")
        return tensor
