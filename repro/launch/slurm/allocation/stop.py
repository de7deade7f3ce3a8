"""Why an allocation is to stop: SLURM's signals as a flag, and what they mean."""

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
"""submitit's signal: the job is preempted or near its time limit, and is to be requeued."""
SIGNALS = (signal.SIGTERM, REQUEUE)
"""SLURM may send them to every process of a job, ranks and commands included; they are for the controller."""
SLURM_QUERY_TIMEOUT_S = 5.0
ACCOUNTING_DELAY_S = 3.0
"""How long the accounting may lag behind."""
MIN_KILL_WAIT_S = 10.0
"""Sites rarely give less than this between SIGTERM and SIGKILL (`KillWait`, 30 s by default)."""
TIME_LIMIT_WARNING_S = 120.0
"""SLURM warns of a time limit up to a minute before it was asked to; signals this near the end mean the limit."""
_REASONS = {"TimeLimit": TIME_LIMIT, "NodeDown": NODE_FAILURE, "Preempted": PREEMPTED}
"""Why a job is completing that did not end by itself; `scancel` leaves no reason."""


class AllocationStop:
    """False until a signal comes or `give_up` is called; the watching loop acts on it."""

    def __init__(self, job: str, restarts: int = 0):
        """`restarts`: how often SLURM has started the job again."""
        self._job, self._restarts = job, restarts
        self.delay_s = 90.0
        """How long before the time limit SLURM was asked to send its signal."""
        self._seen: list[int] = []
        self._why = ""
        self._terminated_node = ""
        """Node where a rank's task got SIGTERM."""

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: nothing happens here."""
        self._seen.append(number)

    def terminate(self, node: str) -> None:
        """SLURM is ending the job, as a task on `node` was told."""
        self._terminated_node = node

    def give_up(self, why: str) -> None:
        """Stop for a reason of our own, after what runs now."""
        self._why = self._why or why

    def __bool__(self) -> bool:
        return bool(self._seen or self._why or self._terminated_node)

    @property
    def stop_s(self) -> float:
        """How long a checkpoint may take: SLURM kills soon after SIGTERM, and after the delay that follows SIGUSR2."""
        return (
            MIN_KILL_WAIT_S if self.terminated else max(MIN_KILL_WAIT_S, self.delay_s - 2 * MIN_KILL_WAIT_S)
        )

    @property
    def requeue(self) -> bool:
        """Whether submitit is to requeue the job: SLURM asked for it, or only a new allocation can go on."""
        return REQUEUE in self._seen or (bool(self) and not self.terminated)

    @property
    def terminated(self) -> bool:
        """Whether SLURM is ending the job and decides itself what becomes of it."""
        return signal.SIGTERM in self._seen or bool(self._terminated_node)

    @property
    def signal(self) -> str:
        """Name of the first signal; empty without one."""
        if self._seen:
            return signal.Signals(self._seen[0]).name
        return "SIGTERM" if self._terminated_node else ""

    @property
    def reason(self) -> str:
        """Why, for a record; empty while it goes on.  SLURM is asked once."""
        if self and not self._why:
            self._why = (
                f"stopped by SLURM ({self.signal}): {stop_reason(self._job, self.delay_s, self._restarts)}"
            )
        return self._why


def stop_reason(job: str, delay_s: float, restarts: int = 0) -> str:
    """What SLURM ends `job` for, as far as it says, while it has been started again `restarts` times."""
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
    if state.startswith("COMPLETING"):  # its end is decided, and hides the state behind it; not the reason
        if int(fields.get("Restarts", "0")) > restarts:  # on its way back into the queue
            return _why_requeued(job, restarts)
        return _REASONS.get(fields.get("Reason", ""), CANCELLED)
    ends = _time(fields.get("EndTime", ""))
    if ends is None:
        return f"{PREEMPTED} or at its {TIME_LIMIT}"
    return TIME_LIMIT if ends - time.time() < delay_s + TIME_LIMIT_WARNING_S else PREEMPTED


def _why_requeued(job: str, restarts: int) -> str:
    """Why SLURM took `job` back into the queue: by the accounting of its runs where there is one."""
    until = time.monotonic() + ACCOUNTING_DELAY_S
    while True:
        runs = _query_slurm(["sacct", "-n", "-X", "-P", "-D", "-j", job, "-o", "State"]).split()
        ended = [state for state in runs if state not in ("PENDING", "RUNNING")]
        down = _down(os.environ.get("SLURM_JOB_NODELIST", ""))
        accounted = len(ended) > restarts  # of this run too
        if down or accounted or not runs or time.monotonic() > until:
            break
        time.sleep(ACCOUNTING_DELAY_S / 10)  # the accounting can only be asked: it has nothing to wait on
    if down:
        return f"{NODE_FAILURE} of {', '.join(down)}"
    if accounted and ended[-1] == "PREEMPTED":
        return PREEMPTED
    if accounted and ended[-1] != "NODE_FAIL":
        return f"{PREEMPTED}, or requeued by hand"
    # A node that was set down for a moment is up again; the time of a preemption would have been said.
    return NODE_FAILURE if accounted else f"{NODE_FAILURE}, or requeued by hand"


def _down(nodes: str) -> list[str]:
    """Which of `nodes`, written as SLURM does, are down."""
    lines = _query_slurm(["sinfo", "-h", "-N", "-n", nodes, "-o", "%N %T"]).splitlines() if nodes else []
    states = (line.partition(" ") for line in lines)
    return sorted({name for name, _, state in states if state.startswith(("down", "fail"))})


def _query_slurm(command: list[str]) -> str:
    """What SLURM answers; nothing if it does not."""
    try:
        with signals_blocked():  # or a command that asks what a signal means dies of that signal
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SLURM_QUERY_TIMEOUT_S, check=False
            )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _time(text: str) -> float | None:
    """Seconds since 1970 of a time as SLURM writes it; None for `None`, `Unknown` and no answer."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """What starts inside has `SIGNALS` blocked for life: a mask is inherited, and there is no moment without."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
