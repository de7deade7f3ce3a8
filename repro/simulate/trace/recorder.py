"""Recorder of a step on `meta` tensors: every operator, message, allocation and release, in order, without a device.

A torch dispatch mode intercepts operators and tracks storages. The mesh's communication ledger reports messages."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from repro.config.enums import Category
from repro.kernels.families import FORMULAS, cost
from repro.measure.operators import UncompiledMode
from repro.parallel import storage
from repro.parallel.ledger import NO_PEER, Address, CommLedger
from repro.simulate.trace.events import (
    HOST_COPY,
    HOST_VIEWS,
    HOST_WAIT,
    Alloc,
    Event,
    Free,
    Mark,
    Message,
    Operator,
    PhaseStart,
)
from repro.simulate.trace.shapes import CallKey, ShapeCache, cached_by_operator, call_key, output_argument


def innermost_line(packages: tuple[str, ...], but: tuple[str, ...] = ()) -> Callable[[], str]:
    """Return a function that returns the line of the innermost frame in `packages` (`repro/model/gpt.py:12`), or `?`.

    `but`: modules whose frames are skipped because they only forward calls of other modules.
    """

    @cache
    def file(module: str) -> str:
        if module in but or not any(f"{module}.".startswith(f"{package}.") for package in packages):
            return ""
        found = module.replace("repro.kernels", "kernels")  # `repro.kernels` is in `kernels/`.
        return f"{found.replace('.', '/')}.py"

    def line() -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if found := file(frame.f_globals.get("__name__", "")):
                return f"{found}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"

    return line


line_of_step = innermost_line(
    ("repro.parallel", "repro.model", "repro.engines.native.model_part", "repro.kernels"),
    but=("repro.parallel.storage",),
)


def no_action() -> tuple[int, int]:
    """Return -1, -1 as the micro-batch and the schedule position outside of forward and backward passes."""
    return -1, -1


class RecordingLedger(CommLedger):
    """Communication ledger that also records every message as a trace event."""

    def __init__(self, events: list[Event]):
        super().__init__()
        self._events = events

    def count(
        self, op: str, group: str, size: int, payload_bytes: int, purpose: str, to: Address = NO_PEER
    ) -> int:
        """Count and record one collective or message, and return the bytes that this rank sends."""
        sent = super().count(op, group, size, payload_bytes, purpose, to)
        peer, channel = to
        self._events.append(
            Message(op, group, size, payload_bytes, sent, purpose, peer=peer, channel=channel)
        )
        return sent


class TraceRecorder(UncompiledMode):
    """Context manager that records initialisation and steps as a trace. The engine reports each phase to `phase`."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = [PhaseStart("init", -1)]
        self.under_way: Callable[[], tuple[int, int]] = no_action
        """Function that returns the micro-batch and the schedule position of the current forward or backward pass."""
        self._phase = "init"
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """Storage number and weak reference of each live storage, by the storage's address."""
        self._unmarked: dict[int, int] = {}
        """Index of the `Alloc` event of each live storage to which no code assigned a category, by storage number."""
        self._count = 0
        self.works = 0
        """Number of the last message; messages are numbered from 1."""
        self.on_processors = False
        """Whether operators allocate memory as on CPUs. Attention then has no state of a random generator, and fp32
        sums of 16-bit products copy the operands to fp32."""
        self._quiet = False
        self._calls: dict[Hashable, tuple[list[Event], int, int]] = {}
        """Recorded function calls (`call_once`), by key: events, number of storages before the call, storages in it."""
        self._released: set[int] = set()
        """Numbers of storages whose memory is freed while their tensors remain, as ZeRO stage 3 does between uses."""

    def phase(self, name: str) -> None:
        """Record the start of a phase of the step."""
        self._phase = name
        self.events.append(PhaseStart(name, *self.under_way()))

    @contextmanager
    def no_operators(self) -> Iterator[None]:
        """Exclude the operators inside this context from the trace; allocations are still recorded."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def number(self, tensor: Tensor) -> int:
        """Return the number of the tensor's storage."""
        return self._live[tensor.untyped_storage()._cdata][0]

    def is_unmarked(self, number: int) -> bool:
        """Return whether a storage is live and no code has assigned it a category."""
        return number in self._unmarked

    def reserve(self, count: int = 1) -> int:
        """Reserve `count` consecutive storage numbers, and return the first one."""
        self._count += count
        return self._count - count

    def make(self, tensor: Callable[[], Tensor], like: Alloc, *, unmarked: bool) -> Tensor:
        """Create a tensor with `tensor()`; record its storage's allocation with all properties of the event `like`."""
        with storage.unobserved():
            made = tensor()
        self._follow(made.untyped_storage(), *like[1:], unmarked=unmarked)
        return made

    def release(self, tensor: Tensor) -> None:
        """Record that the memory of a tensor is freed, although references to the tensor remain."""
        number = self.number(tensor)
        self._released.add(number)
        self.events.append(Free(number))

    def finish(self) -> list[Event]:
        """Return all recorded events. Storages that are live at this time have no `Free` event."""
        events, self.events = self.events, []
        return events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind, name = _kind(func)
        if kind == _VIEW:
            return func(*args, **kwargs)
        key = call_key(func, args, kwargs)
        out = _SHAPES.call(func, args, kwargs, key)
        results = _tensors(out)
        for result in results[:2] if self.on_processors and name in FUSED_ATTENTION else results:
            self._see(result.untyped_storage(), name)
        if kind != _ALLOCATION and not self._quiet:
            event = _OPERATORS.get(key) if key is not None else None
            if event is None:
                event = _operator(func, kind, name, args, kwargs, out, results)
                if key is not None:
                    _OPERATORS[key] = event
            # The operands' shapes do not show which of them are in host memory.
            if name == "aten.copy_" and any(
                storage.category_of(tensor.untyped_storage()) == Category.HOST for tensor in _tensors(args)
            ):
                event = event._replace(name=HOST_COPY)
            self.events.append(event)
        return out

    def resized(self, seen: torch.UntypedStorage, size: int) -> None:
        """Record that a storage's memory was freed (`size` 0) or allocated again without an operator (ZeRO stage 3)."""
        entry = self._live.get(seen._cdata)
        if entry is None:
            return
        number = entry[0]
        if size == 0:
            self._released.add(number)
            self.events.append(Free(number))
        else:
            self._released.discard(number)
            category = storage.category_of(seen) or Category.OTHER
            self.events.append(Alloc(number, size, category, "restore", line_of_step()))

    def call_once(self, key: Hashable, call: Callable[[], None]) -> None:
        """Run the function `call` and record its events; for a known `key`, repeat the recorded events instead."""
        if key not in self._calls:
            start, count, live = len(self.events), self._count, len(self._live)
            call()
            assert len(self._live) == live, f"{key}: a call that is repeated must free all its storages"
            self._calls[key] = self.events[start:], count, self._count - count
            return
        events, before, made = self._calls[key]
        if not made:
            self.events += events
            return
        shift = self.reserve(made) - before
        for event in events:
            if isinstance(event, (Alloc, Free, Mark)):
                event = event._replace(id=event.id + shift)
            self.events.append(event)

    def listed(self, source: Tensor, views: int) -> None:
        """Record that the host created `views` views of a tensor, one by one."""
        self._append(Operator(HOST_VIEWS, 0, 0, 0, (), source.element_size(), calls=views))

    def copied(self, source: Tensor, parts: int) -> None:
        """Record that a tensor was copied in `parts` equal parts, each by one operator."""
        size = _bytes(source)
        self._append(Operator("aten.copy_", 0, size, size, (), source.element_size(), calls=parts))

    def waited(self) -> None:
        """Record that the host waited for the device."""
        self._append(Operator(HOST_WAIT, 0, 0, 0, (), 0))

    def _append(self, operator: Operator) -> None:
        if not self._quiet:
            self.events.append(operator)

    def marked(self, seen: torch.UntypedStorage, category: Category) -> None:
        """Record a category of a storage. The first category of a storage applies from its allocation on."""
        entry = self._live.get(seen._cdata)
        if entry is None:
            return
        index = self._unmarked.pop(entry[0], None)
        if index is None:
            self.events.append(Mark(entry[0], category))
        else:
            event = self.events[index]
            assert isinstance(event, Alloc)
            self.events[index] = event._replace(category=category)

    def _see(self, seen: torch.UntypedStorage, name: str) -> None:
        if seen._cdata in self._live:
            return
        # Tensors of the forward pass are activations unless code assigns another category.
        born = Category.ACTIVATIONS if self._phase == "forward" else Category.OTHER
        self._follow(seen, seen.nbytes(), born, name, line_of_step(), unmarked=True)

    def _follow(
        self,
        seen: torch.UntypedStorage,
        size: int,
        category: Category,
        operator: str,
        line: str,
        *,
        unmarked: bool,
    ) -> None:
        """Record the allocation of a storage, and its release when torch deletes the storage."""
        key, number = seen._cdata, self.reserve()

        def forget(_: object) -> None:
            self._live.pop(key, None)
            self._unmarked.pop(number, None)
            if number not in self._released:
                self.events.append(Free(number))

        reference = weakref.ref(seen, forget)
        self._live[key] = (number, reference)
        seen.watcher = self  # type: ignore[attr-defined]
        if unmarked:
            self._unmarked[number] = len(self.events)
        self.events.append(Alloc(number, size, category, operator, line))


_SHAPES = ShapeCache()
FUSED_ATTENTION = tuple(f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient"))
_OPERATORS: dict[CallKey, Operator] = {}
"""Cache of `Operator` events by operator call, because layers and micro-batches repeat the same calls."""
_VIEW, _ALLOCATION, _FLOPS, _OURS, _PLAIN = range(5)
OVERWRITE = ("aten.copy_", "aten._foreach_copy_", "aten.zero_", "aten.fill_")
"""Operators that write to their first argument without reading it."""
_EMPTY = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")


@cached_by_operator
def _changes_first(func: Any) -> bool:
    """Return whether an operator writes to its first argument."""
    first = func._schema.arguments[0].alias_info
    return first is not None and first.is_write


@cached_by_operator
def _kind(func: Any) -> tuple[int, str]:
    """Return how an operator's cost is counted (as a view, an allocation, by a FLOP formula, ...), and its name."""
    name = str(func.overloadpacket)
    if name.startswith("repro."):
        return (_OURS if name.removeprefix("repro.") in FORMULAS else _PLAIN), name
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    if name in ("aten._unsafe_view", "aten.lift_fresh") or (alias is not None and not alias.is_write):
        return _VIEW, name
    if name in _EMPTY:
        return _ALLOCATION, name
    return (_FLOPS if func.overloadpacket in flop_registry else _PLAIN), name


def _operator(
    func: Any,
    kind: int,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    results: list[Tensor],
) -> Operator:
    itemsize = results[0].element_size() if results else 0
    if kind == _OURS:
        flops, read, written = cost(name.removeprefix("repro."), *args, **kwargs)
        return Operator(name, flops, read, written, (), itemsize)
    operands = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
    # In-place operators on lists of tensors return nothing.
    written = sum(map(_bytes, results or _tensors(args[:1] if _changes_first(func) else ())))
    read = sum(map(_bytes, operands))
    into = args[0] if name in OVERWRITE else output_argument(func, kwargs)
    if into is not None and kwargs.get("beta", 0) == 0:
        read -= sum(map(_bytes, _tensors(into)))  # The operator writes its output without reading it.
    if kind != _FLOPS:
        return Operator(name, 0, read, written, (), itemsize)
    # The operands decide the element size, because a product of 16-bit operands may have an fp32 result.
    itemsize = min(t.element_size() for t in operands)
    flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
    return Operator(name, flops, read, written, tuple(tuple(t.shape) for t in operands), itemsize)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an operator's argument or result, which is a tensor, a list, or a tuple of either."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return []


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
