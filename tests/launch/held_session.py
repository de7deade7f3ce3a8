"""A rank target that trains as the real session does, but waits in step `HELD` while a test requests it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from repro.launch.job import STOP_FILE, Job
from repro.launch.rank_process import HeartbeatWriter

HELD = 3
"""Step, counted from 0, at whose start the ranks wait."""


class _HoldingHeartbeat:
    """A heartbeat that blocks its rank at the start of step `HELD` while a file exists in the folder `FAKE_HOLD`.

    The file `NAME` blocks all ranks of the experiment `NAME` until a stop is requested. The file `NAME.rank-R` blocks
    rank R even after a stop request. Rank 0 appends the name of each started experiment to the file `FAKE_LOG`.
    """

    def __init__(self, heartbeat: HeartbeatWriter, job: Job, rank: int):
        self._heartbeat, self._job = heartbeat, job
        self._folder, self._rank = Path(os.environ["FAKE_HOLD"]), rank
        self._current = -1
        self.collective, self.finished = heartbeat.collective, heartbeat.finished

    def phase(self, index: int, step: int, phase: str) -> None:
        self._heartbeat.phase(index, step, phase)
        name = self._job.experiments[index].name
        if phase == "forward" and index != self._current:
            self._current = index
            if self._rank == 0 and (log := os.environ.get("FAKE_LOG")):
                with open(log, "a", encoding="utf-8") as file:
                    file.write(name + "\n")
        hold_all, hold_rank = self._folder / name, self._folder / f"{name}.rank-{self._rank}"
        stop_file = Path(self._job.folder) / STOP_FILE
        while step == HELD and ((hold_all.exists() and not stop_file.exists()) or hold_rank.exists()):
            time.sleep(0.02)


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Train every experiment of the job."""
    from repro.launch.rank.session import run_rank as run

    holding: Any = _HoldingHeartbeat(heartbeat, job, rank)
    return run(job, rank=rank, world=world, device=device, rendezvous=rendezvous, heartbeat=holding)
