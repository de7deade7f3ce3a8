"""Classes of failed experiments, from a record's outcome and reason, SLURM's job state, or the cause of a SIGABRT.

NCCL's watchdog, a thread of every rank, ends the process with SIGABRT if a peer is lost or the rank's own device fails.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FAILURE_CLASSES = (
    *("node-failure", "out-of-memory", "time-limit", "time-out", "hang", "nccl"),
    *("wrong-hardware", "lost-node", "cancelled", "preempted", "rank-killed", "error"),
)
"""Names of the classes of failed experiments that `failure_class` returns."""

WRONG_HARDWARE = "wrong hardware: "
LOST_NODE = "lost node "
PREEMPTED, TIME_LIMIT, CANCELLED, NODE_FAILURE = "preempted", "time limit", "cancelled", "node failure"
"""Phrases that name SLURM's cause of an interruption in the reason of a record."""

JOB_ENDS = {
    "CANCELLED": ("cancelled", "cancelled (scancel)"),
    "TIMEOUT": ("time-limit", "the job reached its time limit (slurm.time_limit of the profile)"),
    "DEADLINE": ("time-limit", "the job reached its deadline, a time limit"),
    "NODE_FAIL": ("node-failure", "node failure"),
    "BOOT_FAIL": ("node-failure", "node failure: a node did not boot"),
    "OUT_OF_MEMORY": ("out-of-memory", "the job ran out of host memory"),
    "PREEMPTED": ("preempted", "the job was preempted and not requeued"),
    "REVOKED": ("cancelled", "the job was cancelled by the scheduler"),
}
"""Failure class and reason of an experiment without a record, by SLURM's state of its ended job."""
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
    """Return one of `FAILURE_CLASSES` for an experiment; empty for the outcomes `ok` and `diverged` and while it runs.

    `outcome` and `reason` are those of the record, empty without a record. `state` is SLURM's state of the job, for
    example `CANCELLED by 0`. The state counts if there is no record, or if the record's outcome is `interrupted`.
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
        causes = (PREEMPTED, TIME_LIMIT, CANCELLED, NODE_FAILURE)
        interruption = next((cause.replace(" ", "-") for cause in causes if cause in reason), "")
        # SLURM's final state of the job is more exact than the signal that the record names.
        unclear = "error" if outcome else ""
        return (scheduler if scheduler not in ("", "error") else interruption) or scheduler or unclear
    if _NCCL.search(reason):
        return "nccl"
    if _KILLED.search(reason):
        return "rank-killed"
    return "error"


class AbortCause(NamedTuple):
    """Cause of the SIGABRT that ended a rank."""

    severity: str
    """Kind of the failure: `oom`, `error` (the rank's GPU failed), `echo` (NCCL lost a peer rank) or `killed`."""
    why: str
    """Error message of the rank in one line; empty if the cause is unknown."""


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
