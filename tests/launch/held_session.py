"""Real ranks that stay at the start of a step until somebody has seen them there, so that no test races with them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from repro.launch.job import STOP_FILE, Job
from repro.launch.rank_process import HeartbeatWriter

HELD = 3
"""The step, counted from 0, at whose start experiments are held."""


class _HeldBeacon:
    """A heartbeat that keeps its rank in step `HELD` as long as the folder `FAKE_HOLD` says so.

    A file `NAME` holds all ranks of the experiment of that name, until they are asked to stop; `NAME.rank-R`
    holds one, whatever it is asked.  Rank 0 writes to the file `FAKE_LOG` whose turn it is.
    """

    def __init__(self, heartbeat: HeartbeatWriter, job: Job, rank: int):
        self._beacon, self._job = heartbeat, job
        self._folder, self._rank = Path(os.environ["FAKE_HOLD"]), rank
        self._turn = -1
        self.collective, self.finished = heartbeat.collective, heartbeat.finished

    def phase(self, index: int, step: int, phase: str) -> None:
        self._beacon.phase(index, step, phase)
        name = self._job.experiments[index].name
        if phase == "forward" and index != self._turn:
            self._turn = index
            if self._rank == 0 and (log := os.environ.get("FAKE_LOG")):
                with open(log, "a", encoding="utf-8") as file:
                    file.write(name + "\n")
        all_of_it, alone = self._folder / name, self._folder / f"{name}.rank-{self._rank}"
        asked = Path(self._job.folder) / STOP_FILE
        while step == HELD and ((all_of_it.exists() and not asked.exists()) or alone.exists()):
            time.sleep(0.02)


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Train every experiment of the job."""
    from repro.launch.rank.session import run_rank as run

    held: Any = _HeldBeacon(heartbeat, job, rank)
    return run(job, rank=rank, world=world, device=device, rendezvous=rendezvous, heartbeat=held)
