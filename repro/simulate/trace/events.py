"""Event types of a trace. Events contain sizes in bytes, work in FLOP and shapes, but no tensors."""

from __future__ import annotations

from typing import NamedTuple

from repro.config.enums import Category


class Alloc(NamedTuple):
    """Trace event: allocation of a storage. A storage in host memory has the category `host`."""

    id: int
    bytes: int
    category: Category
    operator: str
    """Operator that allocated the storage."""
    line: str
    """Source line of the step that allocates the storage, as `file:line`."""


class Free(NamedTuple):
    """Trace event: release of a storage's memory."""

    id: int


class Mark(NamedTuple):
    """Trace event: change of a storage's memory category, which applies to all following events."""

    id: int
    category: Category


class Operator(NamedTuple):
    """Trace event: one call, or equal consecutive calls, of an operator that computes or moves data, without views."""

    name: str
    flops: int
    read: int
    """Bytes that the operator reads."""
    written: int
    """Bytes that the operator writes."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the operands of a matrix product or of attention; empty for other operators."""
    itemsize: int
    """Size in bytes of a result's element; for matrix products and attention, of the smallest operand element."""
    calls: int = 1
    """Number of calls of the operator. `flops`, `read` and `written` are totals of all calls."""


HOST_COPY = "host copy"
"""Operator name of a copy between host and device memory."""
HOST_VIEWS = "host views"
"""Operator name of views that the host creates one by one without device work; `calls` is the number of views."""
HOST_WAIT = "host wait"
"""Operator name of a wait: the host issues no operator until the device has finished all preceding operators."""


class Message(NamedTuple):
    """Trace event: one collective, or one point-to-point message to another pipeline stage."""

    op: str
    group: str
    size: int
    """Number of ranks in the process group."""
    payload: int
    """Bytes of the full, unsharded tensor that the message transfers (see `repro.parallel.ledger`)."""
    sent: int
    """Bytes that the traced rank sends. For a collective, these are the bytes of a ring algorithm."""
    purpose: str
    work: int = -1
    """Number of a collective, to which a `Wait` refers; -1 for a point-to-point message."""
    peer: int = -1
    """Receiver of a point-to-point message, as a rank of the process group; -1 for a collective."""
    channel: int = 0
    """Channel between two ranks. Messages of one channel arrive in the order of sending."""


class Receive(NamedTuple):
    """Trace event: post of a receive from another pipeline stage. The trace of the sender contains the `Message`."""

    group: str
    payload: int
    """Bytes that arrive."""
    work: int
    peer: int
    """Sender of the message, as a rank of the process group."""
    channel: int


class Wait(NamedTuple):
    """Trace event: wait for the completion of a message or a receive, whose result the following events use."""

    work: int


class PhaseStart(NamedTuple):
    """Trace event: start of a phase of the step, which is init, forward, backward, idle or optimizer."""

    name: str
    micro_batch: int
    """Micro-batch of the phase; -1 outside forward and backward."""
    position: int = -1
    """Position of the current action in the schedule of its pipeline stage; -1 outside forward and backward."""


Event = Alloc | Free | Mark | Operator | Message | Receive | Wait | PhaseStart
Timed = Operator | Message | Wait
"""Trace events that the time model reads. The model derives receives from the pipeline schedule."""
