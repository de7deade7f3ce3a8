"""One job on this machine whose results are taken at once, and of which nothing stays behind."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from repro.launch import supervise
from repro.launch.interrupt import Interrupt
from repro.launch.job import Job
from repro.launch.local.launch import LocalLaunch


def run_once(job: Job, interrupt: Interrupt, *, target: str) -> tuple[supervise.Ending, list[dict[str, Any]]]:
    """How `job` ended, and each rank's result of its first experiment; none unless all ranks have one.

    `target`: what a rank calls, `module:function`.  An interrupt ends the job.
    """
    logs = Path(tempfile.mkdtemp(prefix="repro-once-"))
    launch = LocalLaunch(job, logs / "logs", target=target)
    try:
        launch.start()
        ending = supervise.watch(launch, interrupted=lambda: interrupt.reason)
        return ending, launch.results(0) or []
    finally:
        launch.close(keep_logs=None)
        shutil.rmtree(logs, ignore_errors=True)
