"""Substitute of a CUDA device for tensors without data (`meta`), which orders accesses of streams to memory.

A dispatch mode runs operators on the current stream. Substitutes of `torch.cuda`'s streams and events and of
`Tensor.record_stream` record the order of operations. The device also records each wait of the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from repro.config.enums import Category
from repro.measure.operators import UncompiledMode
from repro.parallel import storage as marks
from repro.simulate.trace.recorder import innermost_line
from tests.races.storages import HOST, Moment, Order, Storage, Storages

COMPUTE = "compute"
"""Stream that is current at the start."""
VIEWS = ("aten._unsafe_view", "aten.lift_fresh")
"""Operators that return their operand's storage although their schema declares no alias."""
EMPTY = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")
"""Operators that allocate and write nothing."""
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.unique_dim")
"""Operators for whose result, or its size, the host waits."""
source_line = innermost_line(
    ("repro",), but=("repro.parallel.transports", "repro.parallel.comm", "repro.parallel.storage")
)
"""Function that returns the product's source line outside modules that only forward waits and collectives."""


class Device(UncompiledMode):
    """Context manager around all operations of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.order = Order()
        self.storages = Storages(self.order)
        self.current = COMPUTE
        self.host_waits: list[str] = []
        """Source lines at which the host waited for the device."""
        self.allocated: list[int] = []
        """Bytes of each allocation on the device, in order."""
        self.ignored_line: str = ""
        """Source line whose waits and calls of `record_stream` have no effect."""
        self.waits: dict[str, None] = {}
        """Source lines of all waits and calls of `record_stream` so far."""
        self._known: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace streams of `torch.cuda` and `Tensor.record_stream`."""
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(self, self.current))
        patch.setattr(torch.cuda, "stream", self._use_stream)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))

    def is_effective(self, line: str) -> bool:
        """Record a wait at this source line, and return whether the wait has an effect."""
        self.waits[line] = None
        return line != self.ignored_line

    @contextmanager
    def _use_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        if self.is_effective(source_line()):
            self.storage_of(tensor).used_by.add(stream.name)

    def host_waits_for(self, actor: str, reason: str) -> None:
        """Order the host after all launched operations of the actor."""
        self.host_waits.append(reason)
        self.order.wait(HOST, self.order.record(actor))

    def storage_of(self, tensor: Tensor, call: str = "") -> Storage:
        """Return the record of the tensor's storage, which the first use creates."""
        memory = tensor.untyped_storage()
        known = self._known.get(memory._cdata)
        if known is not None:
            return known[0]
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        name = f"[{shape}] of {call or source_line()}"
        storage = Storage(name, self.current, pinned=marks.category_of(memory) == Category.HOST)

        def forget(_: object, key: int = memory._cdata) -> None:
            self._known.pop(key, None)
            if not storage.released:
                self.storages.release(storage, source_line())

        self._known[memory._cdata] = storage, weakref.ref(memory, forget)
        memory.watcher = self  # type: ignore[attr-defined]
        self.allocated.append(memory.nbytes())
        return storage

    def resized(self, memory: torch.UntypedStorage, size: int) -> None:
        """Record that the product released or restored a storage without an operator."""
        storage, _ = self._known[memory._cdata]
        if size:
            self.storages.restore(storage, self.current)
            self.allocated.append(size)
        else:
            self.storages.release(storage, source_line())

    def marked(self, memory: torch.UntypedStorage, category: Category) -> None:
        """Record the memory category of a storage."""
        self._known[memory._cdata][0].pinned = category == Category.HOST

    def copied(self, full: Tensor, parts: int) -> None:
        """Record that the current stream wrote a tensor in several parts."""
        self.access(full, self.current, writes=True, call=source_line())

    def listed(self, full: Tensor, views: int) -> None:
        """Ignore new views of a tensor, which neither read nor write."""

    def waited(self) -> None:
        """Record an explicit wait of the host for the device."""
        self.host_waits_for(self.current, source_line())

    def access(self, tensor: Tensor, actor: str, *, writes: bool, call: str) -> None:
        """Record that the actor reads or writes the bytes from the tensor's first element to its last."""
        storage = self.storage_of(tensor, call)
        if tensor.numel():
            first, size = tensor.storage_offset(), tensor.element_size()
            last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            stop = (last + 1) * size
            self.storages.access(storage, actor, first * size, stop, writes=writes, call=call)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, reads, writes, view = described(func)
        call = f"{name.removeprefix('aten.')} {source_line()}"
        if name in WAITS:
            self.host_waits_for(self.current, call)
        out = func(*args, **kwargs)
        if view:
            return out
        arguments = {**dict(enumerate(args)), **kwargs}
        if name in ("aten.copy_", "aten._to_copy"):
            self._check_copy(arguments, out, call)
        for is_written, keys in ((False, reads), (True, writes)):
            for tensor in _tensors([arguments.get(key) for key in keys]):
                if tensor.is_meta:
                    self.access(tensor, self.current, writes=is_written, call=call)
        for tensor in _tensors([out]):
            if tensor.is_meta and name in EMPTY:
                self.storage_of(tensor, call)
            elif tensor.is_meta and not writes:
                self.access(tensor, self.current, writes=True, call=call)
        return out

    def _check_copy(self, arguments: dict[Any, Any], out: Any, call: str) -> None:
        """Record a wait of the host for a copy between host and device, unless non-blocking and page-locked."""
        ends = [tensor for tensor in (arguments[0], arguments.get(1), out) if isinstance(tensor, Tensor)]
        pinned = any(marks.category_of(end.untyped_storage()) == Category.HOST for end in ends)
        pageable = any(end.device.type == "cpu" for end in ends) and any(end.is_meta for end in ends)
        default = arguments.get(2, False) if len(ends) > 1 and 1 in arguments else False
        if pageable or (pinned and not arguments.get("non_blocking", default)):
            self.host_waits_for(self.current, call)


class Stream:
    """Substitute of `torch.cuda.Stream`."""

    def __init__(self, device: Device, name: str):
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        """Order later operations of this stream after all launched operations of `other`."""
        if self.device.is_effective(source_line()):
            self.device.order.wait(self.name, self.device.order.record(other.name))

    def wait_event(self, moment: Moment) -> None:
        """Order later operations of this stream after the event."""
        if self.device.is_effective(source_line()):
            self.device.order.wait(self.name, moment)

    def record_event(self) -> Moment:
        """Return an event after all launched operations of the stream."""
        return self.device.order.record(self.name)


class Described(NamedTuple):
    """Accesses that an operator's schema declares."""

    name: str
    reads: tuple[Any, ...]
    """Indices or names of the arguments."""
    writes: tuple[Any, ...]
    view: bool
    """Whether the operator only returns a view of an operand."""


@cache
def described(func: Any) -> Described:
    """Return the accesses that the operator's schema declares."""
    name = str(func.overloadpacket)
    reads: list[Any] = []
    writes: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        key = argument.name if argument.kwarg_only else index
        alias = argument.alias_info
        (writes if alias is not None and alias.is_write else reads).append(key)
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    view = name in VIEWS or (alias is not None and not alias.is_write)
    return Described(name, tuple(reads), tuple(writes), view)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
