"""What submitit runs in an allocation, and how a job that is to end asks to be requeued."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

AGAIN_S = 2.0
"""After SIGTERM, how long submitit's signal may take to follow: `scancel` sends none, a preemption both."""


@dataclass(frozen=True)
class RunBundle:
    """One bundle of a submission, to be called in its job.  submitit pickles it."""

    submission: str
    """The submission's folder."""
    bundle: int

    def __call__(self) -> dict[str, Any]:
        """Run the bundle; how many experiments had which outcome.

        The handlers of SIGTERM and of submitit's SIGUSR2 only set a flag while it runs: the watching loop ends the
        case that is running, and then submitit's own handler is called from here, the main thread.
        """
        from repro.launch.slurm.allocation import controller

        environment = dict(os.environ)
        folder = Path(self.submission)
        from repro.launch.slurm.allocation.bundle import counts
        from repro.launch.slurm.allocation.stop import REQUEUE, Stop

        stop = Stop(controller.job_of(environment), int(environment.get("SLURM_RESTART_COUNT", "0")))
        previous = {number: signal.signal(number, stop.note) for number in (REQUEUE, signal.SIGTERM)}
        try:
            state = controller.control(folder, self.bundle, stop, environment)
            if state.open and stop.terminated and not stop.requeue:
                _wait_for(stop)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if state.open and stop.requeue:
            _hand_over(previous[REQUEUE], REQUEUE)
        if state.open and stop:
            sys.exit(128 + signal.SIGTERM)
        return counts(state.path)

    def checkpoint(self) -> DelayedSubmission:
        """What submitit requeues: the same again, which does what is missing."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(RunBundle(self.submission, self.bundle))


def _wait_for(stop: Any) -> None:
    """Give submitit's signal the time to follow SIGTERM."""
    end = time.monotonic() + AGAIN_S
    while time.monotonic() < end and not stop.requeue:
        time.sleep(0.05)


def _hand_over(handler: Any, number: int) -> None:
    """Have submitit requeue the job; it ends this process, or raises if it may not be requeued any more."""
    if callable(handler):
        handler(number, None)
    sys.exit(128 + number)
