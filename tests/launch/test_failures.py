"""Tests of failure classes, which follow from the outcome, the reason and the SLURM job state."""

from __future__ import annotations

import pytest

from repro.launch.failures import FAILURE_CLASSES, failure_class


@pytest.mark.parametrize(
    ("outcome", "reason", "state", "expected"),
    [
        ("ok", "", "", ""),
        ("diverged", "loss is nan at step 3", "", ""),
        ("oom", "rank 1 at step 3: MemoryError", "", "out-of-memory"),
        ("timeout", "the experiment did not end within 2 s (limits.timeout_s)", "", "time-out"),
        ("hang", "no progress for 60 s (limits.hang_s): rank 1 is behind", "", "hang"),
        ("error", "rank 1 was killed by signal 9 (SIGKILL) at step 1", "", "rank-killed"),
        ("error", "rank 3 at step 1: DistBackendError: NCCL error in: x.cpp", "", "nccl"),
        ("error", "rank 2 at step 4: lost node n2: no answer from the node for 15 s", "COMPLETED", "lost-node"),
        ("error", "wrong hardware: node n2 has no GPU, but ...", "", "wrong-hardware"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 was at start-up)", "", "preempted"),
        ("interrupted", "stopped by SLURM (SIGUSR2): time limit (rank 0 ...)", "", "time-limit"),
        ("interrupted", "stopped by SLURM (SIGTERM): preempted, or the job reached its time limit",
         "CANCELLED by 0", "cancelled"),
        ("interrupted", "node failure on n2", "NODE_FAIL", "node-failure"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 ...)", "FAILED", "preempted"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 ...)", "TIMEOUT", "time-limit"),
        ("interrupted", "stopped", "FAILED", "error"),
        ("", "", "FAILED", "error"),
        ("", "", "OUT_OF_MEMORY", "out-of-memory"),
        ("", "", "RUNNING", ""),
        ("error", "rank 0 ended with exit code 7 at step 1", "", "error"),
    ],
)  # fmt: skip
def test_failure_class_of_outcome_and_job_state(outcome: str, reason: str, state: str, expected: str) -> None:
    assert failure_class(outcome, reason, state) == expected
    assert expected in ("", *FAILURE_CLASSES)
