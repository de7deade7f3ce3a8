"""A device that computes nothing: its streams, events and memory, for tensors without data (`meta`).

Operators run on the current stream, which a dispatch mode tells; `torch.cuda`'s streams and events, and
`Tensor.record_stream`, are replaced by ones that only order.  What would make the host wait is noted.
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
from tests.races.order import HOST, Moment, Order
from tests.races.storages import Storage, Storages

COMPUTE = "compute"
"""The stream that is current at the start."""
VIEWS = ("aten._unsafe_view", "aten.lift_fresh")
"""Return their operand's storage although the schema does not say so."""
EMPTY = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")
"""Allocate and write nothing."""
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.unique_dim")
"""Have the host wait for what they return, or for its size."""
line_of_product = innermost_line(
    ("repro",), but=("repro.parallel.transports", "repro.parallel.comm", "repro.parallel.storage")
)
"""That says what is done, not how a wait is passed on."""


class Device(UncompiledMode):
    """Use as a context manager around all that the device is to see."""

    def __init__(self) -> None:
        super().__init__()
        self.order = Order()
        self.storages = Storages(self.order)
        self.current = COMPUTE
        self.host_waits: list[str] = []
        """Where the host waited for the device."""
        self.allocated: list[int] = []
        """Bytes of every allocation on the device, in order."""
        self.dropped: str = ""
        """The line of the product whose waits, and notes to the allocator, do nothing."""
        self.waits: dict[str, None] = {}
        """The lines that have waited or told the allocator so far."""
        self._known: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for `torch.cuda`."""
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(self, self.current))
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))

    # -- what the product calls ----------------------------------------------------------------------

    def heeds(self, line: str) -> bool:
        """Whether a wait at this line of the product counts."""
        self.waits[line] = None
        return line != self.dropped

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        if self.heeds(line_of_product()):
            self.storage_of(tensor).used_by.add(stream.name)

    def host_waits_for(self, actor: str, why: str) -> None:
        """The host goes on when the stream has done all that it was given."""
        self.host_waits.append(why)
        self.order.waits(HOST, self.order.reached(actor))

    # -- memory ------------------------------------------------------------------------------------

    def storage_of(self, tensor: Tensor, what: str = "") -> Storage:
        """The storage's record; a new one if the device sees it for the first time."""
        seen = tensor.untyped_storage()
        known = self._known.get(seen._cdata)
        if known is not None:
            return known[0]
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        name = f"[{shape}] of {what or line_of_product()}"
        made = Storage(name, self.current, pinned=marks.category_of(seen) == Category.HOST)

        def forget(_: object, key: int = seen._cdata) -> None:
            self._known.pop(key, None)
            if not made.released:
                self.storages.release(made, line_of_product())

        self._known[seen._cdata] = made, weakref.ref(seen, forget)
        seen.watcher = self  # type: ignore[attr-defined]
        self.allocated.append(seen.nbytes())
        return made

    def resized(self, seen: torch.UntypedStorage, size: int) -> None:
        """A storage was released or restored without an operator."""
        storage, _ = self._known[seen._cdata]
        if size:
            self.storages.restore(storage, self.current)
            self.allocated.append(size)
        else:
            self.storages.release(storage, line_of_product())

    def marked(self, seen: torch.UntypedStorage, category: Category) -> None:
        """A storage says what it is for."""
        self._known[seen._cdata][0].pinned = category == Category.HOST

    def copied(self, full: Tensor, parts: int) -> None:
        """A tensor was written in so many parts."""
        self.touch(full, self.current, writes=True, what=line_of_product())

    def listed(self, full: Tensor, views: int) -> None:
        """So many views of a tensor were made: they read and write nothing."""

    def waited(self) -> None:
        """The host waited for the device, as it was asked to."""
        self.host_waits_for(self.current, line_of_product())

    def touch(self, tensor: Tensor, actor: str, *, writes: bool, what: str) -> None:
        """The actor reads or writes the tensor's bytes: from its first element to its last."""
        storage = self.storage_of(tensor, what)
        if tensor.numel():
            first = tensor.storage_offset()
            last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            size = tensor.element_size()
            self.storages.access(storage, actor, first * size, (last + 1) * size, writes=writes, what=what)

    # -- operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, reads, writes, view = described(func)
        what = f"{name.removeprefix('aten.')} {line_of_product()}"
        if name in WAITS:
            self.host_waits_for(self.current, what)
        out = func(*args, **kwargs)
        if view:
            return out
        given = {**dict(enumerate(args)), **kwargs}
        if name in ("aten.copy_", "aten._to_copy"):
            self._copies(given, kwargs, out, what)
        for written, keys in ((False, reads), (True, writes)):
            for tensor in _tensors([given.get(key) for key in keys]):
                if tensor.is_meta:
                    self.touch(tensor, self.current, writes=written, what=what)
        for tensor in _tensors([out]):
            if tensor.is_meta and name in EMPTY:
                self.storage_of(tensor, what)
            elif tensor.is_meta and not writes:
                self.touch(tensor, self.current, writes=True, what=what)
        return out

    def _copies(self, given: dict[Any, Any], kwargs: dict[str, Any], out: Any, what: str) -> None:
        """The host waits for a copy between it and the device, unless told not to and its memory is page-locked."""
        ends = [tensor for tensor in (given[0], given.get(1), out) if isinstance(tensor, Tensor)]
        pinned = any(marks.category_of(end.untyped_storage()) == Category.HOST for end in ends)
        pageable = any(end.device.type == "cpu" for end in ends) and any(end.is_meta for end in ends)
        asked = given.get("non_blocking", given.get(2, False) if len(ends) > 1 and 1 in given else False)
        if pageable or (pinned and not asked):
            self.host_waits_for(self.current, what)


class Event:
    """A moment of a stream."""

    def __init__(self, moment: Moment):
        self.moment = moment


class Stream:
    """One of the device's streams, as `torch.cuda.Stream`."""

    def __init__(self, device: Device, name: str):
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        """What comes here runs after all that the other has been given."""
        if self.device.heeds(line_of_product()):
            self.device.order.waits(self.name, self.device.order.reached(other.name))

    def wait_event(self, event: Event) -> None:
        """What comes here runs after the event."""
        if self.device.heeds(line_of_product()):
            self.device.order.waits(self.name, event.moment)

    def record_event(self) -> Event:
        """All that the stream has been given."""
        return Event(self.device.order.reached(self.name))


class Described(NamedTuple):
    """What an operator's schema says."""

    name: str
    reads: tuple[Any, ...]
    """Arguments, by place or name."""
    writes: tuple[Any, ...]
    view: bool
    """Whether it returns the memory of an operand and does nothing."""


@cache
def described(func: Any) -> Described:
    """The operator's."""
    name = str(func.overloadpacket)
    reads: list[Any] = []
    writes: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        key = argument.name if argument.kwarg_only else place
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
