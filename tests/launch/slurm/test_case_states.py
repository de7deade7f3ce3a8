"""Tests of submissions and of their case states, which follow from SLURM, progress files and records."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from repro.config import ConfigError
from repro.launch.failures import failure_class
from repro.launch.slurm import case_states
from repro.launch.slurm.case_states import CaseState, Registry, outcome_without_record, status_exit_code
from repro.launch.slurm.scheduler import JobState
from repro.results.store import Store
from tests.clock import Clock
from tests.launch.slurm.conftest import ThreeCases
from tests.records import latest


def test_case_is_pending_running_and_done(submitted: ThreeCases) -> None:
    submitted.slurm.job("12_0", state="PENDING", reason="Resources", nodes="")
    state = {"names": ["b"], "case": "b", "step": 3, "steps": 6, "phase": "backward", "steps_per_s": 1.5}
    submitted.report(1, phase="running", current=state)
    submitted.record("c", "ok")
    assert submitted.row("a") == ("pending", "Resources")
    assert submitted.row("b") == ("running", "step 3 of 6, backward, 1.50 steps/s")
    assert submitted.row("c", "state", "outcome") == ("done", "ok")


def test_cases_of_one_launch_share_state_and_logs(submitted: ThreeCases) -> None:
    """The ranks are at a step of one case. The logs of the launch belong to both cases."""
    state = {"names": ["a", "b"], "case": "b", "step": 3, "steps": 6, "phase": "backward"}
    for compare, detail in (
        (False, "the job of this case runs other cases first"),
        (True, "one job runs this case in turns with b, to compare them"),
    ):
        submitted.report(0, phase="running", current=state | {"compare": compare})
        assert submitted.row("a") == ("running", detail)
    work = submitted.registry.work(submitted.submission)
    (task,) = work.bundles[0].tasks
    together = replace(task, experiments=(*task.experiments, submitted.experiments["b"]))
    replace(work, bundles=(replace(work.bundles[0], tasks=(together,)),)).save(submitted.folder)
    logs = submitted.folder / "logs" / "0" / submitted.experiments["a"].key
    logs.mkdir(parents=True)
    (logs / "rank-0.err").write_text("log of both cases")
    code, out, _ = submitted.repro("logs", "b", "--rank", "0")
    assert (code, "log of both cases" in out) == (0, True)


def test_preempted_case_is_requeued_with_its_reason(submitted: ThreeCases) -> None:
    submitted.record("a", "interrupted", "preempted")
    stopped = {"signal": "SIGUSR2", "reason": "preempted or near its time limit"}
    submitted.report(0, phase="stopped", stopped=stopped)
    submitted.slurm.job("12_0", state="PENDING", reason="BeginTime", nodes="")
    assert submitted.row("a") == ("requeued", "preempted or near its time limit, BeginTime")
    submitted.report(
        0, restarts=3, nodes=["n4", "n5"], phase="running", current={"names": ["a"], "case": "a"}
    )
    submitted.slurm.job("12_0", state="RUNNING", reason="None", nodes="")
    row = submitted.row("a", "state", "restarts", "nodes", "detail")
    assert row == ("running", 3, "n4,n5", "step 0 of 0, ")


NODE_FAIL = JobState(state="NODE_FAIL", nodes="n[1-2]", exit_code="1:9", reason="NodeDown")
FAILED = JobState(state="FAILED", exit_code="0:0", reason="NonZeroExitCode")
NO_MEMORY, PREEMPTED = JobState(state="OUT_OF_MEMORY"), JobState(state="PREEMPTED")


@pytest.mark.parametrize(
    ("job", "outcome", "reason", "failure"),
    [
        (NODE_FAIL, "interrupted", "node failure, on n[1-2], exit code 1:9, NodeDown", "node-failure"),
        (FAILED, "error", "the job ended as FAILED without a record", "error"),
        (NO_MEMORY, "interrupted", "the job ran out of host memory", "out-of-memory"),
        (PREEMPTED, "interrupted", "the job was preempted and not requeued", "preempted"),
        (None, "error", "lost: SLURM no longer lists the job, and the job wrote no record", "error"),
    ],
)
def test_job_state_determines_outcome_without_record(
    job: JobState | None, outcome: str, reason: str, failure: str
) -> None:
    assert outcome_without_record(job) == (outcome, reason)
    assert failure_class(outcome, reason, job.state if job else "") == failure


KNOWN: dict[str, Any] = {"submission": "x", "suite": "s", "name": "a", "key": "k", "bundle": 0, "job": "12"}


def test_status_exit_code_follows_from_case_states() -> None:
    for code, *states in (
        *((0,), (0, "done", "done"), (1, "done", "failed"), (1, "cancelled"), (1, "not submitted")),
        *((3, "failed", "pending"), (3, "requeued"), (3, "running", "done")),
    ):
        assert status_exit_code([CaseState(**KNOWN, state=state) for state in states]) == code, states


def test_older_records_do_not_count_for_new_submissions(submitted: ThreeCases) -> None:
    experiment = submitted.record("a", "error", "an older run")
    later = datetime.now(timezone.utc).isoformat()
    submitted.registry.write(replace(submitted.submission, created=later))
    assert submitted.status()["a"]["state"] == "running"
    assert experiment.key in latest(submitted.results)


def test_record_order_does_not_depend_on_node_clocks(submitted: ThreeCases) -> None:
    """Records after the newest record at submission belong to the submission, whatever their times are."""
    submitted.record("a", "error", "an older run")
    with Store(submitted.results) as store:
        store.records()
        later = replace(submitted.submission, created="9999-01-01T00:00:00+00:00", newest_record=store.newest)
    submitted.registry.write(later)
    submitted.record("b", "ok")
    submitted.slurm.set(jobs={})
    states = [submitted.row(name, "recorded", "state") for name in "abc"]
    assert states == [(False, "lost"), (True, "done"), (False, "lost")]
    assert "no longer lists the job" in submitted.row("c")[1]


def test_status_contains_all_case_fields(submitted: ThreeCases) -> None:
    unknown = {**dict.fromkeys(("detail", "outcome", "job_state", "nodes", "failure"), ""), "restarts": 0}
    unknown["recorded"] = False
    assert CaseState(**KNOWN, state="done").as_dict() == KNOWN | unknown | {"state": "done"}
    submitted.slurm.job("12_0", state="PENDING", reason="JobHeldUser", nodes="")
    row = {"suite": "faults", "key": submitted.experiments["a"].key, "job": "12_0", "state": "pending"}
    row |= {"job_state": "PENDING", "detail": "JobHeldUser, `scontrol release 12_0` releases the job"}
    assert submitted.status()["a"] == KNOWN | unknown | row


def test_lost_case_names_interrupt_and_job_end(submitted: ThreeCases) -> None:
    submitted.record("a", "interrupted", "preempted at step 3")
    submitted.slurm.job("12_0", state="TIMEOUT", reason="None")
    limit = "the job reached its time limit (slurm.time_limit of the profile), on n1"
    row = submitted.row("a", "state", "outcome", "detail")
    assert row == ("lost", "interrupted", f"preempted at step 3; {limit}")
    submitted.slurm.set(jobs={})
    assert submitted.status()["a"]["detail"] == "preempted at step 3"


def test_status_table_shows_failures(submitted: ThreeCases) -> None:
    submitted.record("a", "hang", "no progress for 2 s: rank 1 is behind [at step 3]")
    submitted.record("b", "ok")
    code, out, _ = submitted.repro("status")
    assert code == 3
    assert "failed: hang" in out
    assert "[at step 3]" in " ".join(out.split())
    assert "faults: 3 cases: 1 running, 1 done, 1 failed" in out
    (submitted.folder / "submission.json").write_text("{")
    code, _, error = submitted.repro("status")
    assert (code, "submission.json" in error) == (2, True), "the damaged file is named"


def test_submission_id_contains_time_and_suite_name(tmp_path: Path) -> None:
    found = Registry(tmp_path).new_id("a suite: of / signs" + "x" * 60)
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-a-suite-of-signs{'x' * 24}-[0-9a-f]{{4}}", found)


def test_lock_of_a_dead_submit_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(tmp_path)
    lock, here = registry.folder / ".submitting", socket.gethostname()
    registry.folder.mkdir()
    monkeypatch.setattr(case_states, "time", Clock(now := 1_800_000_000.0))

    def is_replaced(host: str, pid: int, age_s: int = 0) -> bool:
        lock.write_text(json.dumps({"host": host, "pid": pid}))
        os.utime(lock, (now - age_s,) * 2)
        try:
            with registry.submitting():
                return True
        except ConfigError:
            return False

    assert not is_replaced(here, os.getpid())
    assert is_replaced(here, 2**22 + 1)
    assert not lock.exists()
    assert not is_replaced("elsewhere", 2**22 + 1, 600), "processes of another host are unknown"
    assert is_replaced("elsewhere", 2**22 + 1, 601)
    # Without an init process, as in some containers, a killed process remains a zombie.
    with subprocess.Popen(["true"]) as dead:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{dead.pid}").exists()
        assert is_replaced(here, dead.pid)
