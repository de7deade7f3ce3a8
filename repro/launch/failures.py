"""Classification of failures: from a record's outcome and reason, from the scheduler, and from a rank's abort.

NCCL's watchdog is a thread of every rank that ends the process with SIGABRT when a peer is lost or its own device has
failed. `classify_abort` distinguishes these causes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FAILURE_CLASSES = (
    *("node-failure", "out-of-memory", "time-limit", "time-out", "hang", "nccl"),
    *("wrong-hardware", "lost-node", "cancelled", "preempted", "rank-killed", "error"),
)
"""Return values of `failure_class`; `""` means no failure."""

WRONG_HARDWARE = "wrong hardware: "
LOST_NODE = "lost node "
PREEMPTED, TIME_LIMIT, CANCELLED, NODE_FAILURE = "preempted", "time limit", "cancelled", "node failure"
"""Words in the reasons of interruptions by SLURM."""

JOB_ENDS = {
    "CANCELLED": ("cancelled", "cancelled (scancel)"),
    "TIMEOUT": ("time-limit", "the job reached its time limit (slurm.time_limit of the profile)"),
    "DEADLINE": ("time-limit", "the job reached its deadline, a time limit"),
    "NODE_FAIL": ("node-failure", "node failure"),
    "BOOT_FAIL": ("node-failure", "node failure: it did not boot"),
    "OUT_OF_MEMORY": ("out-of-memory", "the job ran out of host memory"),
    "PREEMPTED": ("preempted", "preempted and not requeued"),
    "REVOKED": ("cancelled", "cancelled by the scheduler"),
}
"""Failure class, and reason for a case without a record, by SLURM's state of a job that ended for an outside cause."""
_INTERRUPTIONS = {
    PREEMPTED: "preempted",
    TIME_LIMIT: "time-limit",
    CANCELLED: "cancelled",
    NODE_FAILURE: "node-failure",
}
_OUTCOMES = {"oom": "out-of-memory", "timeout": "time-out", "hang": "hang"}
_NCCL = re.compile(r"\bnccl|DistBackendError", re.IGNORECASE)
_KILLED = re.compile(r"rank \d+ was killed by signal")
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


def failure_class(outcome: str, reason: str, state: str = "") -> str:
    """Return one of `FAILURE_CLASSES`, or `""` for a result (`ok`, `diverged`) and for a running experiment.

    `outcome` and `reason` are a record's, empty without a record. `state` is SLURM's state of the job (`NODE_FAIL`,
    `CANCELLED by 0`), which counts if the record is less exact.
    """
    if outcome in ("ok", "diverged"):
        return ""
    if reason.startswith(WRONG_HARDWARE):
        return "wrong-hardware"
    if LOST_NODE in reason:
        return "lost-node"
    if outcome in _OUTCOMES:
        return _OUTCOMES[outcome]
    word = state.split()[0].rstrip("+") if state else ""
    scheduler = "error" if word == "FAILED" else JOB_ENDS.get(word, ("", ""))[0]
    if outcome in ("", "interrupted"):
        interruption = next((kind for word, kind in _INTERRUPTIONS.items() if word in reason), "")
        # The scheduler's final state is more exact than a signal.
        unclear = "error" if outcome else ""
        return (scheduler if scheduler not in ("", "error") else interruption) or scheduler or unclear
    if _NCCL.search(reason):
        return "nccl"
    if _KILLED.search(reason):
        return "rank-killed"
    return "error"


class AbortCause(NamedTuple):
    """Cause of a rank's SIGABRT."""

    severity: str
    """`oom`, `error` (its device failed), `echo` (NCCL ended it after the loss of a peer) or `killed` (unknown)."""
    why: str
    """Message of the rank in one line; empty if there is none."""


def classify_abort(text: str) -> AbortCause:
    """Return the cause of a rank's SIGABRT from the end of its standard error, `text`."""
    if found := _NO_MEMORY.search(text):
        return AbortCause("oom", found[1])
    watchdog = _WATCHDOG.search(text)
    if watchdog is None:
        return AbortCause("killed", "")
    message = watchdog[1] or watchdog[0]
    if device := _DEVICE.search(message):
        return AbortCause("error", device[0].strip())
    return AbortCause("echo", f"NCCL's watchdog: {message.strip()}")
