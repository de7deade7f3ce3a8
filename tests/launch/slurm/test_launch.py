"""What a launch on several nodes says of a rank that runs, that has ended, and whose node is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from repro.config import Experiment, Layout
from repro.launch.job import Job
from repro.launch.slurm.allocation.launch import LOST_TASK_GRACE_S, ClusterLaunch
from repro.launch.slurm.allocation.stop import AllocationStop
from tests.training import TINY


def test_a_lost_rank_is_told_from_one_that_runs_and_one_that_failed(tmp_path: Path) -> None:
    job = Job(experiments=[Experiment(name="a", model=TINY, layout=Layout(dp=4))])
    nobody: Any = None
    made = ClusterLaunch(
        job, tmp_path, nobody, ["n1", "n1", "n2", "n2"], target="x:y", stop=AllocationStop("7")
    )
    runs, failed, lost, full = made._ranks
    assert [made.poll(rank) for rank in range(4)] == [None] * 4
    assert made.report(0) is None
    failed.code, failed.report = 3, {"rank": 1, "outcome": "oom"}
    full.code, full.full = 1, "/shared/rank-3.out"
    lost.loss_reason, lost.lost_at, lost.ended_alone = "its task ended", time.monotonic(), True
    assert (made.poll(2), made.report(2)) == (None, None), "its signal may come a moment later"
    lost.lost_at -= LOST_TASK_GRACE_S
    assert [made.poll(rank) for rank in range(4)] == [None, 3, 1, 1]
    assert made.report(0) is None
    assert made.report(1) == failed.report
    assert made.report(2) == {"rank": 2, "outcome": "error", "reason": "lost node n2: its task ended"}
    reason = "disk full while starting the ranks: /shared/rank-3.out"
    assert made.report(3) == {"rank": 3, "outcome": "error", "reason": reason}
    made.ask_to_stop()
    assert made.report(2) == {"rank": 2, "outcome": "interrupted", "reason": "lost node n2: its task ended"}
    for rank, seen in enumerate(made._ranks):
        seen.results[0] = {"rank": rank}
        assert (made.results(0) is None) == (rank < 3), "those of all ranks, or none"
    assert runs.code is None
