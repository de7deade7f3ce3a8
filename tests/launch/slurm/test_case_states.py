"""Tests of submitted cases: states from SLURM, progress files and records; `repro logs`, `cancel` and `collect`."""

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

from repro import cli
from repro.config import ConfigError
from repro.launch.failures import failure_class
from repro.launch.slurm import case_states, commands
from repro.launch.slurm.case_states import CaseState, Registry, outcome_without_record, status_exit_code
from repro.launch.slurm.scheduler import JobState
from repro.results.store import Store
from tests.clock import Clock
from tests.launch.slurm.conftest import ThreeCases
from tests.records import latest, lines


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


def test_logs_print_the_ends_of_files_with_headings(submitted: ThreeCases) -> None:
    def printed(*arguments: str) -> list[str]:
        code, out, _ = submitted.repro("logs", *arguments)
        assert code == 0
        return out.splitlines()

    assert printed("b") == ["no log: job 12_1 of b"]
    (line,) = printed("b", "--rank", "0")
    assert line == "no log: rank 0 of b; the logs of a rank exist while it runs, and after a failure"
    job = submitted.folder / "submitit" / "12_1_0_log"
    job.parent.mkdir()
    Path(f"{job}.out").write_text("fine\n\n")
    Path(f"{job}.err").write_text("x" * 8000)
    ranks = submitted.folder / "logs" / "1" / submitted.experiments["b"].key
    ranks.mkdir(parents=True)
    for rank in (10, 9, 0):
        (ranks / f"rank-{rank}.err").write_text(f"error {rank}")
    (ranks / "rank-0.out").write_text("out 0")
    assert printed("b") == [
        *(f"==> {job}.err", "x" * 8000, f"==> {job}.out", "fine"),
        "ranks with logs: 0, 9, 10; --rank R prints the log of rank R",
    ]
    tails = [f"==> {ranks}/rank-0.out", "out 0", f"==> {ranks}/rank-0.err", "error 0"]
    assert printed("b", "--rank", "0") == tails
    Path(f"{job}.err").write_text("x" * 8001)
    assert printed("b")[:2] == [f"==> {job}.err (last 8000 of 8001 bytes)", "x" * 8000]
    for arguments, error in (
        (["b", "--rank=2"], "0 to 1"),
        (["b", "--rank=-1"], "0 to 1"),
        (["d"], "case = 'd': must be a submitted case: a, b, c"),
    ):
        code, _, message = submitted.repro("logs", *arguments)
        assert (code, error in message) == (2, True), message


def test_long_lists_show_only_the_nearest_names() -> None:
    assert commands.list_names("x", ["a", "b", "a"]) == "a, b"
    names = [f"case-{i}" for i in range(500)]
    assert commands.list_names("case-77x", names).startswith("case-77, ")
    assert commands.list_names("case-77x", names).endswith(" (8 of 500)")


def test_cancel_selects_by_case_or_suite(submitted: ThreeCases) -> None:
    code, _, error = submitted.repro("cancel", "nothing")
    assert code == 2
    assert "a suite, submission or case that waits or runs: a, b, c" in error
    assert submitted.repro("cancel", "b")[0] == submitted.repro("cancel", "faults")[0] == 0
    assert submitted.slurm.calls("scancel") == [["12_1"], ["12_0", "12_2"]]


def test_jobs_without_a_record_are_recorded_once(submitted: ThreeCases) -> None:
    ends = {
        "a": ("CANCELLED", "cancelled", "cancelled", "interrupted"),
        "b": ("NODE_FAIL", "lost", "node-failure", "interrupted"),
        "c": ("FAILED", "lost", "error", "error"),
    }
    for place, (job_state, *_) in enumerate(ends.values()):
        submitted.slurm.job(f"12_{place}", state=job_state)
    for name, end in ends.items():
        row = submitted.row(name, "job_state", "state", "failure", "outcome", "recorded")
        assert row == (*end, False)
    for recorded in ([*"abc"], []):
        code, out, _ = submitted.repro("collect", "--json")
        document = json.loads(out)
        assert (code, document["recorded"], document["records"]) == (1, recorded, 3)
        failures = [case["failure"] for case in document["cases"]]
        assert failures == [end[2] for end in ends.values()], "the new record has the same class"
    newest = latest(submitted.results)
    for name, (job_state, _, _, outcome) in ends.items():
        record = newest[submitted.experiments[name].key]
        assert (record["outcome"], record["provenance"]["slurm"]["state"]) == (outcome, job_state)
        assert record["wall_s"] == 0, "the duration is unknown"
    assert document["bad_nodes"] == {"n1": 1}


def test_node_failures_are_counted_per_node() -> None:
    """The reason of a node failure names nodes; without names, all nodes of the case count."""
    cases = [
        CaseState(**KNOWN, state="failed", detail=reason, outcome=outcome, nodes="n[1-3]")
        for reason, outcome in (
            ("lost node n2: no answer from the node for 15 s", "error"),
            ("node failure of n2, n3", "interrupted"),
            ("wrong hardware: all of them", "error"),
            ("rank 0: n1 is bad", "error"),
        )
    ]
    cases.append(CaseState(**KNOWN, state="failed", detail="lost node", outcome="error"))
    assert commands.count_bad_nodes(cases) == {"n2": 3, "n3": 2, "n1": 1}


def test_collect_prints_totals_failures_and_bad_nodes(submitted: ThreeCases, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    submitted.record("a", "hang", "rank 1 is behind")
    submitted.slurm.job("12_1", state="NODE_FAIL", reason="NodeDown")
    code, out, _ = submitted.repro("collect", "--into", str(target))
    assert code == 1
    assert out.splitlines() == [
        "0 of 3 cases done, 1 waiting or running, 1 lost or cancelled and recorded.",
        f"2 records in {submitted.results}/records.",
        f"2 of the records are new in {target}/records.",
        "1 failure because of node n1; use `repro submit --exclude n1`.",
        "a: hang: rank 1 is behind.",
        "b: node-failure: node failure, on n1, NodeDown.",
    ]
    for name in "abc":
        submitted.record(name, "ok")
    damaged = next(submitted.results.glob("records/*.jsonl"))
    damaged.write_bytes(damaged.read_bytes() + b'{"half": ')
    code, out, error = submitted.repro("collect")
    assert code == 0
    assert out.splitlines() == [
        "3 of 3 cases done, 0 waiting or running, 0 lost or cancelled and recorded.",
        f"5 records in {submitted.results}/records.",
    ]
    assert error.startswith("note: ")
    assert "incomplete record" in error
    code, out, _ = submitted.repro("collect", "--into", str(target), "--json")
    assert (code, json.loads(out)["copied"]) == (0, 3), "two records are there already"
    assert len(lines(target)) == 5


def test_collect_needs_a_submission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collect", "--results", str(tmp_path)]) == 2
    assert "a folder that `repro submit` has used" in capsys.readouterr().err
