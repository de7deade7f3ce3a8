"""What a rank that ended in `abort()` wrote before it: an allocation that failed, a fault of its device, or an echo.

NCCL's watchdog is a thread of every rank that ends its process when a peer is gone, so that a rank that dies of
nothing but its peer's death is killed by SIGABRT.  It does the same when its own device has failed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NO_MEMORY = re.compile(
    r"terminate called after throwing .{0,400}?(std::bad_alloc|can(?:'|no)t allocate memory)",
    re.IGNORECASE | re.DOTALL,
)
_WATCHDOG = re.compile(
    r"watchdog thread terminated with exception: *([^\n]+)"
    r"|watchdog caught collective operation timeout"
    r"|process.* due to \w* ?watchdog hang"
    r"|to avoid data inconsistency, we are taking the entire process down",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"(?:CUDA error|Cuda failure)[^\n]*", re.IGNORECASE)


class LastWords(NamedTuple):
    """Why a rank aborted."""

    severity: str
    """`oom`, `error` (its device failed), `echo` (NCCL ended it since a peer is gone) or `killed` (nobody knows)."""
    why: str
    """What it said of it, one line; empty if it said nothing."""


def of_an_abort(text: str) -> LastWords:
    """What the end of a rank's standard error, `text`, says of its SIGABRT."""
    if found := _NO_MEMORY.search(text):
        return LastWords("oom", found[1])
    watchdog = _WATCHDOG.search(text)
    if watchdog is None:
        return LastWords("killed", "")
    said = watchdog[1] or watchdog[0]
    device = _DEVICE.search(said)
    return (
        LastWords("error", device[0].strip())
        if device
        else LastWords("echo", f"NCCL's watchdog: {said.strip()}")
    )
