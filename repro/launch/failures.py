"""The class of a failure: what went wrong, in one word, of an outcome, its reason and the scheduler's state."""

from __future__ import annotations

import re

CLASSES = (
    *(
        "node-failure",
        "out-of-memory",
        "time-limit",
        "time-out",
        "hang",
        "nccl",
        "wrong-hardware",
        "lost-node",
    ),
    *("cancelled", "preempted", "rank-killed", "error"),
)
"""All that `failure` says of a failure; an experiment that has its result has none: `""`."""

WRONG_HARDWARE = "wrong hardware: "
LOST_NODE = "lost node "
PREEMPTED, TIME_LIMIT, CANCELLED, NODE_FAILURE = "preempted", "time limit", "cancelled", "node failure"
"""Words in the reasons of what SLURM interrupted."""

_STATES = {
    "NODE_FAIL": "node-failure",
    "BOOT_FAIL": "node-failure",
    "OUT_OF_MEMORY": "out-of-memory",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "preempted",
    "FAILED": "error",
}
_INTERRUPTIONS = {
    PREEMPTED: "preempted",
    TIME_LIMIT: "time-limit",
    CANCELLED: "cancelled",
    NODE_FAILURE: "node-failure",
}
_OUTCOMES = {"oom": "out-of-memory", "timeout": "time-out", "hang": "hang"}
_NCCL = re.compile(r"\bnccl|DistBackendError", re.IGNORECASE)
_KILLED = re.compile(r"rank \d+ was killed by signal")


def failure(outcome: str, reason: str, state: str = "") -> str:
    """One of `CLASSES`; `""` for a result (`ok`, `diverged`) and for what has not ended.

    `outcome` and `reason` are a record's, empty where there is none; `state` is what SLURM says of the
    job (`NODE_FAIL`, `CANCELLED by 0`): it counts where the record does not know better.
    """
    if outcome in ("ok", "diverged"):
        return ""
    if reason.startswith(WRONG_HARDWARE):
        return "wrong-hardware"
    if LOST_NODE in reason:
        return "lost-node"
    if outcome in _OUTCOMES:
        return _OUTCOMES[outcome]
    scheduler = _STATES.get(state.split()[0].rstrip("+") if state else "", "")
    if outcome in ("", "interrupted"):
        said = next((kind for word, kind in _INTERRUPTIONS.items() if word in reason), "")
        # What the scheduler says in the end is more exact than what a signal could tell.
        unclear = "error" if outcome else ""
        return (scheduler if scheduler not in ("", "error") else said) or scheduler or unclear
    if _NCCL.search(reason):
        return "nccl"
    if _KILLED.search(reason):
        return "rank-killed"
    return "error"
