"""Activation checkpoints: what forward keeps of a block for recomputation, and where (1910.02054 sec. 6.1).

| layout | a rank keeps of x [b, s, h] | before the block runs again |
|---|---|---|
| (neither) | x itself | nothing |
| `pa` | its 1/tp, P_a | an all-gather over the tp group |
| `pa_cpu` | that (with tp = 1 or sp: x) in host memory, P_a+cpu | a copy to the device; then the same |

The copy to the device starts while the block after it runs backward.

With `md` what is kept lies in one allocation (M_D, sec. 6.3).  On CUDA copies to and from the host run on
a stream of their own and the host never waits for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repro.config import Layout
from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group
from repro.parallel.zero.partition import ALIGNMENT
from repro.parallel.zero_r.defragmentation import Arena, Piece


class Saved:
    """One checkpoint, from `Checkpoints.save` to `Checkpoints.free`."""

    __slots__ = ("arena", "before", "device", "fetched", "kept", "piece", "ready", "shape")

    def __init__(self, x: Tensor, before: Saved | None):
        self.shape, self.device = x.shape, x.device
        self.before = before
        """The checkpoint that backward needs next."""
        self.kept: Tensor | None = None
        """What was saved: x, or a flat part of it, on the device or the host; None once it is not needed."""
        self.arena: Arena | None = None
        self.piece: Piece | None = None
        """Where `kept` lies under `md`."""
        self.fetched: Tensor | None = None
        """The copy back on the device, flat."""
        self.ready: torch.cuda.Event | None = None
        """When the copy back is there (CUDA)."""

    def drop(self) -> None:
        """Free what was kept."""
        if self.arena is not None and self.piece is not None:
            self.arena.give(self.piece)
        self.kept = self.piece = None

    def __del__(self) -> None:
        self.drop()  # a graph whose backward never ran


class Checkpoints:
    """The checkpoints of one engine.  They may be loaded in any order, each once."""

    def __init__(self, layout: Layout, tp: Group, capacity: int):
        """`capacity`: how many may be alive at once, which `md` sets aside."""
        self.tp, self.capacity = tp, capacity
        self.parts = tp.size if layout.pa else 1
        self.offload, self.contiguous = layout.pa_cpu, layout.md
        self.arena: Arena | None = None
        """Made when the first checkpoint tells the size of all."""
        self._stream: torch.cuda.Stream | None = None

    @property
    def _plain(self) -> bool:
        """Whether x itself is kept."""
        return self.parts == 1 and not self.offload and not self.contiguous

    def save(self, x: Tensor, before: Saved | None = None) -> Saved:
        """Keep a block's input `x` [b, s, h] (sp: [b, s/t, h]); `before` is what will be loaded after it.

        With `pa` all ranks of the tp group must save the same values.
        """
        saved = Saved(x, before)
        if self._plain:
            saved.kept = storage.mark(x.detach(), Category.CHECKPOINTS)
            return saved
        size = -(-x.numel() // self.parts)  # parts are equal; the last one may end in padding
        first = self.tp.rank * size if self.parts > 1 else 0
        part = x.detach().reshape(-1)[first : first + size]
        saved.kept = self._room(size, x, saved)
        target = saved.kept[: part.numel()]
        stream = self._side(x) if self.offload else None
        if stream is None:
            target.copy_(part)
        else:
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                target.copy_(part, non_blocking=True)
            part.record_stream(stream)  # x is reused when the copy is done, without waiting for it here
        return saved

    def load(self, saved: Saved) -> Tensor:
        """The block's input, complete on the device; starts to fetch the one that is needed next.

        What was kept is freed where the result is a copy of it; where not, `free` does when the
        result is not needed any more.  Raises `RuntimeError` the second time.
        """
        if saved.kept is None and saved.fetched is None:
            raise RuntimeError("a block's backward pass ran a second time; its checkpoint is gone")
        before, saved.before = saved.before, None
        if self.offload:
            self._fetch(saved)
            if before is not None:
                self._fetch(before)
            if saved.ready is not None:
                torch.cuda.current_stream(saved.device).wait_event(saved.ready)
            part, saved.fetched = saved.fetched, None
        else:
            part = saved.kept
        assert part is not None
        if self._plain:
            saved.kept = None
            return part
        if self.parts > 1:
            whole = torch.empty(part.numel() * self.parts, dtype=part.dtype, device=part.device)
            self.tp.all_gather(whole, part, purpose="checkpoints").wait()
            saved.drop()
            part = whole
        return part[: saved.shape.numel()].view(saved.shape)

    def free(self, saved: Saved) -> None:
        """The result of `load` is not needed any more."""
        saved.drop()

    def _room(self, size: int, like: Tensor, saved: Saved) -> Tensor:
        """Where a checkpoint of `size` elements is kept."""
        make = storage.empty_on_host if self.offload else storage.empty
        category = Category.HOST if self.offload else Category.CHECKPOINTS
        if not self.contiguous:
            return make(size, like, category)
        if self.arena is None:
            piece = -(-size // ALIGNMENT) * ALIGNMENT
            self.arena = Arena(make(self.capacity * piece, like, category), [piece] * self.capacity)
        saved.arena, saved.piece = self.arena, self.arena.take(size)
        return saved.piece.tensor

    def _fetch(self, saved: Saved) -> None:
        """Start to copy a checkpoint from the host to the device, unless that has begun or it is gone."""
        if saved.kept is None:
            return
        like = torch.empty(0, dtype=saved.kept.dtype, device=saved.device)
        saved.fetched = storage.empty(saved.kept.numel(), like, Category.CHECKPOINTS)
        stream = self._side(saved.fetched)
        if stream is None:
            saved.fetched.copy_(saved.kept)
        else:
            stream.wait_stream(torch.cuda.current_stream(saved.device))
            with torch.cuda.stream(stream):
                saved.fetched.copy_(saved.kept, non_blocking=True)
                saved.ready = stream.record_event()
            saved.fetched.record_stream(stream)
        # Whatever is copied there next comes later on the same stream.
        saved.drop()

    def _side(self, x: Tensor) -> torch.cuda.Stream | None:
        """The stream of copies to and from the host; None where there are no streams."""
        if x.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        return self._stream
