"""Reasons to stop an allocation: SLURM's signals as a flag, and their meaning."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from types import FrameType

from repro.launch.failures import CANCELLED, NODE_FAILURE, PREEMPTED, TIME_LIMIT

REQUEUE = signal.SIGUSR2
"""submitit's signal: the job is preempted or near its time limit, and should be requeued."""
SIGNALS = (signal.SIGTERM, REQUEUE)
"""Signals that SLURM may send to all processes of a job, ranks and commands too; only the controller acts."""
SLURM_QUERY_TIMEOUT_S = 5.0
ACCOUNTING_DELAY_S = 3.0
"""Maximum delay of the accounting, in seconds."""
MIN_KILL_WAIT_S = 10.0
"""Time between SIGTERM and SIGKILL that almost every site allows (`KillWait`, 30 s by default), in seconds."""
TIME_LIMIT_WARNING_S = 120.0
"""Time before the end, in seconds, in which a signal means the time limit.  SLURM may warn a minute early."""
_REASONS = {"TimeLimit": TIME_LIMIT, "NodeDown": NODE_FAILURE, "Preempted": PREEMPTED}
"""Reason in SLURM of a completing job that did not end by itself; `scancel` leaves no reason."""


class AllocationStop:
    """Flag that a signal or `give_up` sets; the watching loop acts on it."""

    def __init__(self, job: str, restarts: int = 0):
        """`restarts`: number of restarts of the job by SLURM."""
        self._job, self._restarts = job, restarts
        self.delay_s = 90.0
        """Requested time between SLURM's signal and the time limit, in seconds."""
        self._seen: list[int] = []
        self._why = ""
        self._terminated_node = ""
        """Node where a rank's task got SIGTERM."""

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, as its handler."""
        self._seen.append(number)

    def terminate(self, node: str) -> None:
        """Record that SLURM ends the job, as a task on `node` reported."""
        self._terminated_node = node

    def give_up(self, why: str) -> None:
        """Request a stop for a reason of our own, after the running work."""
        self._why = self._why or why

    def __bool__(self) -> bool:
        return bool(self._seen or self._why or self._terminated_node)

    @property
    def stop_s(self) -> float:
        """Return the time for a checkpoint, in seconds: SLURM kills soon after SIGTERM, and `delay_s` after SIGUSR2."""
        delay_s = 0.0 if self.terminated else self.delay_s - 2 * MIN_KILL_WAIT_S
        return max(MIN_KILL_WAIT_S, delay_s)

    @property
    def requeue(self) -> bool:
        """Return whether submitit should requeue the job: SLURM requested it, or only a new allocation can continue."""
        return REQUEUE in self._seen or (bool(self) and not self.terminated)

    @property
    def terminated(self) -> bool:
        """Return whether SLURM is ending the job and itself decides about a requeue."""
        return signal.SIGTERM in self._seen or bool(self._terminated_node)

    @property
    def signal(self) -> str:
        """Return the name of the first signal; empty without one."""
        if self._seen:
            return signal.Signals(self._seen[0]).name
        return "SIGTERM" if self._terminated_node else ""

    @property
    def reason(self) -> str:
        """Return the reason for a record; empty without a stop.  SLURM is queried once."""
        if self and not self._why:
            reason = stop_reason(self._job, self.delay_s, self._restarts)
            self._why = f"stopped by SLURM ({self.signal}): {reason}"
        return self._why


def stop_reason(job: str, delay_s: float, restarts: int = 0) -> str:
    """Return SLURM's reason to end `job`, as far as it is known, after `restarts` restarts."""
    fields = dict(re.findall(r"(\w+)=(\S*)", _query_slurm(["scontrol", "show", "job", "-o", job])))
    state, started = fields.get("JobState", ""), _time(fields.get("StartTime", ""))
    if state.startswith("CANCELLED"):
        return CANCELLED
    if state.startswith(("NODE_FAIL", "BOOT_FAIL")):
        return NODE_FAILURE
    preempted = _time(fields.get("PreemptTime", ""))
    if state.startswith(("PREEMPTED", "SUSPENDED")) or (preempted and preempted >= (started or 0.0)):
        return PREEMPTED
    if state.startswith(("TIMEOUT", "DEADLINE")):
        return TIME_LIMIT
    if state.startswith("COMPLETING"):  # the state hides the final one and is no reason
        if int(fields.get("Restarts", "0")) > restarts:  # on its way back into the queue
            return _why_requeued(job, restarts)
        return _REASONS.get(fields.get("Reason", ""), CANCELLED)
    ends = _time(fields.get("EndTime", ""))
    if ends is None:
        return f"{PREEMPTED} or at its {TIME_LIMIT}"
    return TIME_LIMIT if ends - time.time() < delay_s + TIME_LIMIT_WARNING_S else PREEMPTED


def _why_requeued(job: str, restarts: int) -> str:
    """Return SLURM's reason to requeue `job`, from the accounting of its runs if there is one."""
    until = time.monotonic() + ACCOUNTING_DELAY_S
    while True:
        runs = _query_slurm(["sacct", "-n", "-X", "-P", "-D", "-j", job, "-o", "State"]).split()
        ended = [state for state in runs if state not in ("PENDING", "RUNNING")]
        down = _down(os.environ.get("SLURM_JOB_NODELIST", ""))
        accounted = len(ended) > restarts  # the accounting includes this run
        if down or accounted or not runs or time.monotonic() > until:
            break
        time.sleep(ACCOUNTING_DELAY_S / 10)  # the accounting has no notification, so it is polled
    if down:
        return f"{NODE_FAILURE} of {', '.join(down)}"
    if accounted and ended[-1] == "PREEMPTED":
        return PREEMPTED
    if accounted and ended[-1] != "NODE_FAIL":
        return f"{PREEMPTED}, or requeued by hand"
    # A node that was down for a moment is up again; a preemption would have left its time.
    return NODE_FAILURE if accounted else f"{NODE_FAILURE}, or requeued by hand"


def _down(nodes: str) -> list[str]:
    """Return the nodes of `nodes`, written as in SLURM, that are down."""
    lines = _query_slurm(["sinfo", "-h", "-N", "-n", nodes, "-o", "%N %T"]).splitlines() if nodes else []
    states = (line.partition(" ") for line in lines)
    return sorted({name for name, _, state in states if state.startswith(("down", "fail"))})


def _query_slurm(command: list[str]) -> str:
    """Return the answer of SLURM; empty without an answer."""
    try:
        with signals_blocked():  # otherwise the signal could end the query itself
            done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _time(text: str) -> float | None:
    """Return a time of SLURM in seconds since 1970; None for `None`, `Unknown` and no answer."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block `SIGNALS` for processes that start in this context: they inherit the mask at once and keep it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
