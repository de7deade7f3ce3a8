"""What happens in a step, as data: the events of a trace.  Bytes, FLOP and shapes; no tensors."""

from __future__ import annotations

from typing import NamedTuple

from repro.config.enums import Category


class Alloc(NamedTuple):
    """A storage gets memory.  Host memory has the category `host`."""

    id: int
    bytes: int
    category: Category
    operator: str
    """What made it."""
    line: str
    """Where in the code of the step, `file:line`."""


class Free(NamedTuple):
    """A storage's memory is released."""

    id: int


class Mark(NamedTuple):
    """A storage is for something else from now on."""

    id: int
    category: Category


class Operator(NamedTuple):
    """An operator that computes or moves data (views are left out): one call of it, or some alike in a row."""

    name: str
    flops: int
    read: int
    """Bytes."""
    written: int
    """Bytes."""
    shapes: tuple[tuple[int, ...], ...]
    """Operands of a matrix product or of attention; else empty."""
    itemsize: int
    """Bytes of an element of its result."""
    calls: int = 1
    """Among which FLOP and bytes are divided equally."""


HOST_COPY = "host copy"
"""A copy between host and device."""
HOST_VIEWS = "host views"
"""So many views that the host makes one by one: nothing for the device."""
HOST_WAIT = "host wait"
"""The host waits until the device has done all before: it issues what follows only then."""


class Message(NamedTuple):
    """One collective, or one message to another stage."""

    op: str
    group: str
    size: int
    """Ranks of the group."""
    payload: int
    """Bytes of the whole message (see `repro.parallel.ledger`)."""
    sent: int
    """Bytes that this rank sends in a ring."""
    purpose: str
    work: int = -1
    """A collective's number, which a `Wait` names."""
    peer: int = -1
    """Of a message to another rank: the group's rank that receives it."""
    channel: int = 0
    """Messages of one channel between two ranks arrive in the order of sending."""


class Receive(NamedTuple):
    """A receive is posted; its sender has the message."""

    group: str
    payload: int
    """Bytes."""
    work: int
    peer: int
    """The group's rank that sends."""
    channel: int


class Wait(NamedTuple):
    """What follows uses the result of a message: it runs when that is complete."""

    work: int


class PhaseStart(NamedTuple):
    """A phase of the step begins: init, forward, backward, idle, optimizer."""

    name: str
    micro_batch: int
    """The micro-batch that is under way; -1 outside forward and backward."""
    position: int = -1
    """Of the action that is under way in its stage's schedule; -1 likewise."""


Event = Alloc | Free | Mark | Operator | Message | Receive | Wait | PhaseStart
Timed = Operator | Message | Wait
"""What seconds follow from; receives follow from the schedule."""
