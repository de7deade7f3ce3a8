"""Measurement of live bytes by memory category, from the storages of all tensors that operators return.

`repro.parallel.storage` sets the category of parameters, gradients, optimizer states, checkpoints and communication;
other allocations of the forward pass are activations.  An allocator's rounding and temporaries inside an operator are
not counted.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from repro.config.enums import ACCOUNTED, Category, Phase
from repro.measure.operators import UncompiledMode, has_wrapper_type
from repro.parallel import storage


class AllocationHistory:
    """Measured or simulated allocations of one device, in the format of `torch.cuda.memory._snapshot`.

    Each allocation has a number, which the caller chooses.
    """

    def __init__(self, line: Callable[[], str] = str) -> None:
        """Create an empty allocation history. `line`: function that returns the current source line, as `file:line`."""
        self.line = line
        self.events: list[dict[str, Any]] = []
        self.segments: Sequence[Sequence[tuple[int, int, int | None]]] = []
        """Allocator segments at the end of the run, as lists of blocks (address, bytes, allocation number or None)."""
        self._live: dict[int, dict[str, Any]] = {}
        self._end = 0

    def add(self, action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
        """Add an allocator event of type `action`, e.g. `segment_free`, to the allocation history. Return the event."""
        # PyTorch's memory viewer fails if no event has the category `unknown`.
        found = {"action": action, "addr": address, "size": size, "stream": 0}
        self.events.append({**found, "frames": [], "category": "unknown", **more})
        return self.events[-1]

    def alloc(
        self, number: int, address: int, size: int, category: str, operator: str, line: str, phase: str
    ) -> None:
        """Add an allocation, whose stack trace is the operator with its source line, then the phase of the step."""
        file, _, at = line.rpartition(":")
        frames = [
            {"name": operator, "filename": file or "?", "line": int(at) if file else 0},
            {"name": str(phase), "filename": "phase", "line": 0},
        ]
        self._live[number] = self.add("alloc", address, size, frames=frames, category=str(category))

    def free(self, number: int) -> None:
        """Add the events that free allocation `number`; do nothing if the history has no such live allocation."""
        if event := self._live.pop(number, None):
            for action in ("free_requested", "free_completed"):
                self.add(action, event["addr"], event["size"], frames=event["frames"])

    def resize(self, number: int, size: int, category: str, operator: str, phase: str) -> None:
        """Set the size of an allocation by moving it to a new allocator segment; size 0 frees the allocation."""
        event = self._live.get(number)
        if event is not None and event["size"] == size:
            event["category"] = str(category)
            return
        if event is not None:
            self.free(number)
            self.add("segment_free", event["addr"], event["size"])
        if size:
            self.add("segment_alloc", self._end, size)
            self.alloc(number, self._end, size, category, operator, self.line(), phase)
            self._end += size

    def final_segments(self, device: int) -> Iterator[dict[str, Any]]:
        """Yield the allocator segments at the end of the run; if none are stored, one segment per live allocation."""
        single = [[(event["addr"], event["size"], number)] for number, event in self._live.items()]
        for stretch in self.segments or single:
            blocks = []
            for address, size, number in stretch:
                event = {"size": 0, "frames": []} if number is None else self._live[number]
                state = "inactive" if number is None else "active_allocated"
                found = {"address": address, "size": size, "requested_size": event["size"], "state": state}
                blocks.append({**found, "frames": event["frames"]})
            total = sum(size for _, size, _ in stretch)
            live = sum(size for _, size, number in stretch if number is not None)
            found = {"device": device, "address": stretch[0][0], "total_size": total, "allocated_size": live}
            yield {**found, "stream": 0, "blocks": blocks}


def write_memory_snapshot(path: Path, devices: Sequence[AllocationHistory]) -> None:
    """Write the allocation histories of several devices as one snapshot file for PyTorch's memory viewer."""
    segments = [segment for number, one in enumerate(devices) for segment in one.final_segments(number)]
    document = {"segments": segments, "device_traces": [history.events for history in devices]}
    path.write_bytes(pickle.dumps(document, protocol=4))  # PyTorch's viewer cannot read pickle protocol 5.


class _TrackedStorage:
    """A live tensor storage, with the memory category and the bytes under which the tracker counts the storage."""

    __slots__ = ("born", "category", "reference", "size")

    def __init__(self, reference: weakref.ref[torch.UntypedStorage], born: Category):
        self.reference = reference
        self.born = born
        """Memory category of the storage until `repro.parallel.storage.mark` sets another category."""
        self.category, self.size = born, 0


class MemoryTracker(UncompiledMode):
    """Context manager that tracks live bytes by category during initialisation and steps; the caller sets `phase`."""

    def __init__(self, history: AllocationHistory | None = None) -> None:
        """Create a memory tracker. `history`: history to which the tracker adds the device's allocations, or None."""
        super().__init__()
        self.history, self._operator = history, "empty"
        self.phase = Phase.INIT
        """Phase of the step. A new storage without a category is an activation in the forward phase, else `other`."""
        self._live: dict[int, _TrackedStorage] = {}
        self._counted = self._nothing()
        """Live bytes by memory category, updated by every allocation, release and change of a category."""
        self._now = self._nothing()
        """Live bytes by memory category after the last operator."""
        self._newborn: list[tuple[_TrackedStorage, Category, int]] = []
        """Tensor storages that the last operator created, with each storage's counted memory category and bytes."""
        self._now_phase = self.phase
        self._peak, self._most, self._peak_phase = self._nothing(), self._nothing(), ""

    @property
    def peak(self) -> dict[str, int]:
        """Return the live bytes by memory category at the time when the device's total live bytes peaked."""
        self._update_peaks()
        return dict(self._peak)

    @property
    def peak_phase(self) -> str:
        """Return the phase of the step in which the device's total live bytes peaked."""
        self._update_peaks()
        return self._peak_phase

    @property
    def most(self) -> dict[str, int]:
        """Return the peak live bytes of each memory category and of the device's total, each at its own time."""
        self._update_peaks()
        return dict(self._most)

    def __enter__(self) -> MemoryTracker:
        # A dispatch mode does not see that ZeRO 3 and FSDP2 resize storages of parameters, so `resize_` is replaced.
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_(data: torch.UntypedStorage, size: int) -> Any:
            found = resize(data, size)
            tracker.resized(data, size)
            return found

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        for live, seen in self._storages():
            self._follow(live, seen)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for live, _ in self._storages():
            live.watcher = None  # type: ignore[attr-defined]

    def _storages(self) -> Iterator[tuple[torch.UntypedStorage, _TrackedStorage]]:
        """Yield each live tensor storage with the tracker's record of the storage."""
        for seen in list(self._live.values()):
            if (live := seen.reference()) is not None:
                yield live, seen

    def marked(self, data: torch.UntypedStorage, category: Category) -> None:
        """Update the live bytes after `repro.parallel.storage.mark` has set the category of a storage."""
        self.resized(data, data.nbytes())

    def resized(self, data: torch.UntypedStorage, size: int) -> None:
        """Update the live bytes after a tensor storage has been resized to `size` bytes."""
        seen = self._live.get(data._cdata)
        if seen is not None:
            self._count(seen, storage.category_of(data) or seen.born, size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if has_wrapper_type(types):
            return NotImplemented
        self._update_peaks()
        out = func(*args, **(kwargs or {}))
        self._operator = str(func.overloadpacket) if self.history else ""
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        self._now, self._now_phase = _with_total(dict(self._counted)), self.phase
        return out

    def live(self) -> dict[str, int]:
        """Return the bytes of all live storages by memory category, and their `total` on the device."""
        found = self._nothing()
        for live, seen in self._storages():
            category = storage.category_of(live) or seen.born
            if category != Category.SHAPE:
                found[category] += live.nbytes()
        return _with_total(found)

    @staticmethod
    def _nothing() -> dict[str, int]:
        return dict.fromkeys(("total", *ACCOUNTED), 0)

    def _update_peaks(self) -> None:
        """Update the peak memory by the live bytes after the last operator.

        This runs before the next operator, because a new storage gets its category after the operator that creates it.
        """
        for seen, counted_as, size in self._newborn:
            live = seen.reference()
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

    def _see(self, data: torch.UntypedStorage) -> None:
        key = data._cdata
        if key in self._live:
            self.resized(data, data.nbytes())
            return
        born = Category.ACTIVATIONS if self.phase == Phase.FORWARD else Category.OTHER
        if data.device.type == "meta":
            # Storages on `meta` belong to a model that is not sharded yet, or to fake tensors of DTensor.
            born = Category.SHAPE

        def forget(_: object) -> None:
            self._count(self._live.pop(key), born, 0)

        seen = self._live[key] = _TrackedStorage(weakref.ref(data, forget), born)
        self._follow(data, seen)
        self._newborn.append((seen, seen.category, seen.size))

    def _follow(self, data: torch.UntypedStorage, seen: _TrackedStorage) -> None:
        """Add a tensor storage to the live bytes, and observe later changes of the storage's category and size."""
        self._count(seen, storage.category_of(data) or seen.born, data.nbytes())
        data.watcher = self  # type: ignore[attr-defined]

    def _count(self, seen: _TrackedStorage, category: Category, size: int) -> None:
        """Update the live bytes by category for a tensor storage that now has `size` bytes and this `category`."""
        if self.history is not None:
            on_device = 0 if category in (Category.HOST, Category.SHAPE) else size
            self.history.resize(id(seen), on_device, category, self._operator, self.phase)
        if seen.category != Category.SHAPE:
            self._counted[seen.category] -= seen.size
        if category != Category.SHAPE:
            self._counted[category] += size
        seen.category, seen.size = category, size


def _with_total(found: dict[str, int]) -> dict[str, int]:
    """Add the key `total`, the sum of all categories except host memory, to the bytes by category; return the bytes."""
    found["total"] = 0
    found["total"] = sum(found.values()) - found[Category.HOST]
    return found
