"""Stop of a SLURM job: the signals that SLURM sends before it ends a job, and the reason why it ends the job."""

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
"""Signal that SLURM sends before a preemption or the time limit, after which submitit requeues the job."""
SIGNALS = (signal.SIGTERM, REQUEUE)
"""Signals that SLURM may send to every process of an ending job. Only the controller acts on them."""
SLURM_QUERY_TIMEOUT_S = 5.0
ACCOUNTING_DELAY_S = 3.0
"""Maximum time in seconds from the end of a SLURM job until `sacct` lists the end."""
MIN_KILL_WAIT_S = 10.0
"""Assumed minimum time from SIGTERM to SIGKILL, in seconds; SLURM's default (`KillWait`) is 30 s."""
TIME_LIMIT_WARNING_S = 120.0
"""Tolerance in seconds for the time of SLURM's warning signal before a time limit; SLURM may send it a minute early."""
_REASONS = {"TimeLimit": TIME_LIMIT, "NodeDown": NODE_FAILURE, "Preempted": PREEMPTED}
"""Cause of a SLURM job's end, by the field `Reason` in `scontrol show job`; `scancel` sets no reason, so no entry."""


class AllocationStop:
    """Stop request for this SLURM job: true after a signal to this process or to a task, and after `give_up`."""

    def __init__(self, job: str, restarts: int = 0):
        """Create a stop request that is not set. `restarts`: number of times that SLURM has requeued the job `job`."""
        self._job, self._restarts = job, restarts
        self.delay_s = 90.0
        """Time before the job's time limit at which SLURM sends the signal `REQUEUE`, in seconds."""
        self._seen: list[int] = []
        self._why = ""
        self._terminated_node = ""
        """Name of the node where SLURM sent SIGTERM to a rank's task; empty without one."""

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record that this process received signal `number`; use this method as the signal handler."""
        self._seen.append(number)

    def terminate(self, node: str) -> None:
        """Record that a task on `node` received SIGTERM, which means that SLURM ends the job."""
        self._terminated_node = node

    def give_up(self, why: str) -> None:
        """Request a stop for the reason `why`, such as a lost node. The first reason counts."""
        self._why = self._why or why

    def __bool__(self) -> bool:
        return bool(self._seen or self._why or self._terminated_node)

    @property
    def stop_s(self) -> float:
        """Return the seconds in which ranks can write a checkpoint before SLURM kills the ranks."""
        delay_s = 0.0 if self.terminated else self.delay_s - 2 * MIN_KILL_WAIT_S
        return max(MIN_KILL_WAIT_S, delay_s)

    @property
    def requeue(self) -> bool:
        """Return whether submitit should requeue the job: after SIGUSR2, or if this allocation cannot continue."""
        return REQUEUE in self._seen or (bool(self) and not self.terminated)

    @property
    def terminated(self) -> bool:
        """Return whether SLURM ends the job with SIGTERM, so that SLURM and not submitit decides about a requeue."""
        return signal.SIGTERM in self._seen or bool(self._terminated_node)

    @property
    def signal(self) -> str:
        """Return the name of the first received signal, for example `SIGTERM`; empty without one."""
        if self._seen:
            return signal.Signals(self._seen[0]).name
        return "SIGTERM" if self._terminated_node else ""

    @property
    def reason(self) -> str:
        """Return why this SLURM job stops, for its records; empty without a stop.  The first call queries SLURM."""
        if self and not self._why:
            reason = stop_reason(self._job, self.delay_s, self._restarts)
            self._why = f"stopped by SLURM ({self.signal}): {reason}"
        return self._why


def stop_reason(job: str, delay_s: float, restarts: int = 0) -> str:
    """Return why SLURM ends `job`, which SLURM has requeued `restarts` times. The text may name two alternatives."""
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
    if state.startswith("COMPLETING"):  # The state COMPLETING does not show how the job ends.
        if int(fields.get("Restarts", "0")) > restarts:  # SLURM has just requeued the job
            return _why_requeued(job, restarts)
        return _REASONS.get(fields.get("Reason", ""), CANCELLED)
    ends = _time(fields.get("EndTime", ""))
    if ends is None:
        return f"{PREEMPTED}, or the job reached its {TIME_LIMIT}"
    return TIME_LIMIT if ends - time.time() < delay_s + TIME_LIMIT_WARNING_S else PREEMPTED


def _why_requeued(job: str, restarts: int) -> str:
    """Return why SLURM requeued `job`, from the states of its nodes, and from `sacct` if the site has accounting."""
    until = time.monotonic() + ACCOUNTING_DELAY_S
    while True:
        runs = _query_slurm(["sacct", "-n", "-X", "-P", "-D", "-j", job, "-o", "State"]).split()
        ended = [state for state in runs if state not in ("PENDING", "RUNNING")]
        down = _down(os.environ.get("SLURM_JOB_NODELIST", ""))
        accounted = len(ended) > restarts  # `sacct` already lists the end of the requeued run.
        if down or accounted or not runs or time.monotonic() > until:
            break
        # SLURM does not announce new accounting data, so `sacct` is polled.
        time.sleep(ACCOUNTING_DELAY_S / 10)
    if down:
        return f"{NODE_FAILURE} of {', '.join(down)}"
    if accounted and ended[-1] == "PREEMPTED":
        return PREEMPTED
    if accounted and ended[-1] != "NODE_FAIL":
        return f"{PREEMPTED}, or the job was requeued by `scontrol requeue`"
    # The failed node is up again. The job was not preempted, because the caller has found no PreemptTime.
    return NODE_FAILURE if accounted else f"{NODE_FAILURE}, or the job was requeued by `scontrol requeue`"


def _down(nodes: str) -> list[str]:
    """Return the names of the nodes in the SLURM node list `nodes` that are down."""
    lines = _query_slurm(["sinfo", "-h", "-N", "-n", nodes, "-o", "%N %T"]).splitlines() if nodes else []
    states = (line.partition(" ") for line in lines)
    return sorted({name for name, _, state in states if state.startswith(("down", "fail"))})


def _query_slurm(command: list[str]) -> str:
    """Return the standard output of a SLURM command; empty if the command is missing or does not answer in time."""
    try:
        # SLURM signals all processes of the job. An unblocked signal would end `command`.
        with signals_blocked():
            done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _time(text: str) -> float | None:
    """Return a time that SLURM printed, in seconds since 1970; None for text without a time, such as `Unknown`."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block `SIGNALS` inside the context. Processes that start there inherit the mask, so `SIGNALS` cannot end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
