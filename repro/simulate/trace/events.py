"""Events of a trace: the contents of a step as bytes, FLOP and shapes, without tensors."""

from __future__ import annotations

from typing import NamedTuple

from repro.config.enums import Category


class Alloc(NamedTuple):
    """Allocation of a storage. Host memory has the category `host`."""

    id: int
    bytes: int
    category: Category
    operator: str
    """Operator that made the storage."""
    line: str
    """Source line of the step, as `file:line`."""


class Free(NamedTuple):
    """Release of a storage's memory."""

    id: int


class Mark(NamedTuple):
    """Change of a storage's category from this event on."""

    id: int
    category: Category


class Operator(NamedTuple):
    """An operator that computes or moves data (views are left out): one call, or several equal calls in a row."""

    name: str
    flops: int
    read: int
    """Bytes that the operator reads."""
    written: int
    """Bytes that the operator writes."""
    shapes: tuple[tuple[int, ...], ...]
    """Operands of a matrix product or of attention; empty for other operators."""
    itemsize: int
    """Bytes of an element of the result."""
    calls: int = 1
    """Number of calls, among which FLOP and bytes are divided equally."""


HOST_COPY = "host copy"
"""A copy between host and device."""
HOST_VIEWS = "host views"
"""Views that the host makes one by one (`calls` is their number); the device does nothing."""
HOST_WAIT = "host wait"
"""The host waits until the device has finished all preceding operators, and then issues the following ones."""


class Message(NamedTuple):
    """One collective, or one message to another pipeline stage."""

    op: str
    group: str
    size: int
    """Ranks of the group."""
    payload: int
    """Bytes of the full message (see `repro.parallel.ledger`)."""
    sent: int
    """Bytes that this rank sends in a ring."""
    purpose: str
    work: int = -1
    """Number of a collective, which a `Wait` names."""
    peer: int = -1
    """Receiver of a point-to-point message, as a rank of the group; -1 for a collective."""
    channel: int = 0
    """Channel between two ranks. Messages of one channel arrive in the order of sending."""


class Receive(NamedTuple):
    """A receive is posted. The sender's trace contains the message."""

    group: str
    payload: int
    """Bytes that arrive."""
    work: int
    peer: int
    """Sender, as a rank of the group."""
    channel: int


class Wait(NamedTuple):
    """The following events use the result of a message, so the step waits for its completion."""

    work: int


class PhaseStart(NamedTuple):
    """A phase of the step begins: init, forward, backward, idle, optimizer."""

    name: str
    micro_batch: int
    """Micro-batch of the phase; -1 outside forward and backward."""
    position: int = -1
    """Position of the current action in its stage's schedule; -1 outside forward and backward."""


Event = Alloc | Free | Mark | Operator | Message | Receive | Wait | PhaseStart
Timed = Operator | Message | Wait
"""Events that determine time. The times of receives follow from the schedule."""
