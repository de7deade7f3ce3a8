"""Event types of a trace. Events contain sizes in bytes, work in FLOP and shapes, but no tensors."""

from __future__ import annotations

from typing import NamedTuple

from repro.config.enums import Category


class Alloc(NamedTuple):
    """Allocation of a storage. Host memory has the category `host`."""

    id: int
    bytes: int
    category: Category
    operator: str
    """Operator that allocated the storage."""
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
    """One call, or several equal consecutive calls, of an operator that computes or moves data. Views are excluded."""

    name: str
    flops: int
    read: int
    """Bytes that the operator reads."""
    written: int
    """Bytes that the operator writes."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the operands of a matrix product or of attention; empty for other operators."""
    itemsize: int
    """Bytes of an element of the result; for matrix products and attention, of the smallest element among operands."""
    calls: int = 1
    """Number of calls. `flops`, `read` and `written` are totals of all calls."""


HOST_COPY = "host copy"
"""Operator name of a copy between host and device memory."""
HOST_VIEWS = "host views"
"""Operator name of views that the host creates one by one without work of the device; `calls` is their number."""
HOST_WAIT = "host wait"
"""Operator name of a wait: the host issues no operator until the device has finished all preceding ones."""


class Message(NamedTuple):
    """One collective, or one point-to-point message to another pipeline stage."""

    op: str
    group: str
    size: int
    """Number of ranks in the group."""
    payload: int
    """Bytes of the full message (see `repro.parallel.ledger`)."""
    sent: int
    """Bytes that this rank sends; for a collective, with a ring algorithm."""
    purpose: str
    work: int = -1
    """Number of a collective, to which a `Wait` refers; -1 for a point-to-point message."""
    peer: int = -1
    """Receiver of a point-to-point message, as a rank of the group; -1 for a collective."""
    channel: int = 0
    """Channel between two ranks. Messages of one channel arrive in the order of sending."""


class Receive(NamedTuple):
    """Post of a receive from another pipeline stage. The `Message` is in the trace of the sender."""

    group: str
    payload: int
    """Bytes that arrive."""
    work: int
    peer: int
    """Sender, as a rank of the group."""
    channel: int


class Wait(NamedTuple):
    """Wait for the completion of a message or a receive, whose result the following events use."""

    work: int


class PhaseStart(NamedTuple):
    """Start of a phase of the step: init, forward, backward, idle or optimizer."""

    name: str
    micro_batch: int
    """Micro-batch of the phase; -1 outside forward and backward."""
    position: int = -1
    """Position of the current action in the schedule of its pipeline stage; -1 outside forward and backward."""


Event = Alloc | Free | Mark | Operator | Message | Receive | Wait | PhaseStart
Timed = Operator | Message | Wait
"""Events that the time model reads. It derives receives from the pipeline schedule."""
