"""Tests of the reported state of a rank that runs, that has failed, or whose node was lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from repro.config import Experiment, Layout
from repro.launch.job import Job
from repro.launch.slurm.allocation.launch import LOST_TASK_GRACE_S, ClusterLaunch
from repro.launch.slurm.allocation.stop import AllocationStop
from tests.training import TINY


def test_running_failed_and_lost_ranks_have_different_reports(tmp_path: Path) -> None:
    job = Job(experiments=[Experiment(name="a", model=TINY, layout=Layout(dp=4))])
    no_allocation: Any = None
    launch = ClusterLaunch(
        job, tmp_path, no_allocation, ["n1", "n1", "n2", "n2"], target="x:y", stop=AllocationStop("7")
    )
    running, failed, lost, full = launch._ranks
    assert [launch.poll(rank) for rank in range(4)] == [None] * 4
    assert launch.report(0) is None
    failed.code, failed.report = 3, {"rank": 1, "outcome": "oom"}
    full.code, full.full = 1, "/shared/rank-3.out"
    lost.loss_reason, lost.lost_at, lost.ended_alone = "its task ended", time.monotonic(), True
    assert (launch.poll(2), launch.report(2)) == (None, None), "a signal may still explain the end"
    lost.lost_at -= LOST_TASK_GRACE_S
    assert [launch.poll(rank) for rank in range(4)] == [None, 3, 1, 1]
    assert launch.report(0) is None
    assert launch.report(1) == failed.report
    assert launch.report(2) == {"rank": 2, "outcome": "error", "reason": "lost node n2: its task ended"}
    reason = "disk full while starting the ranks: /shared/rank-3.out"
    assert launch.report(3) == {"rank": 3, "outcome": "error", "reason": reason}
    launch.ask_to_stop()
    assert launch.report(2) == {"rank": 2, "outcome": "interrupted", "reason": "lost node n2: its task ended"}
    for rank, status in enumerate(launch._ranks):
        status.results[0] = {"rank": rank}
        assert (launch.results(0) is None) == (rank < 3), "results of all ranks or None"
    assert running.code is None
