"""Tests of case states, which follow from SLURM, progress files and records, and of `repro cancel`."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from repro import cli
from repro.launch.slurm.case_states import CaseState, Submission, outcome_without_record, status_exit_code
from repro.launch.slurm.scheduler import JobState
from repro.results.store import Store
from tests.launch.slurm.submitted import ThreeCases
from tests.records import latest


def test_case_is_pending_running_and_done(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.slurm.job("12_0", state="PENDING", reason="Resources", nodes="")
    state = {"names": ["b"], "case": "b", "step": 3, "steps": 6, "phase": "backward", "steps_per_s": 1.5}
    submitted.report(1, phase="running", current=state)
    submitted.record("c", "ok")
    found = submitted.status(capsys)
    assert (found["a"]["state"], found["a"]["detail"]) == ("pending", "Resources")
    assert (found["b"]["state"], found["b"]["detail"]) == ("running", "step 3 of 6, backward, 1.50 steps/s")
    assert (found["c"]["state"], found["c"]["outcome"]) == ("done", "ok")


@pytest.mark.parametrize(
    ("compare", "detail"),
    [(True, "alternates with b in a comparison"), (False, "its job runs other cases first")],
)
def test_cases_of_one_launch_share_state_and_logs(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str], compare: bool, detail: str
) -> None:
    """The ranks are at a step of one case. The logs of the launch belong to both cases."""
    state = {"names": ["a", "b"], "case": "b", "compare": compare, "step": 3, "steps": 6, "phase": "backward"}
    submitted.report(0, phase="running", current=state)
    found = submitted.status(capsys)
    assert (found["a"]["state"], found["a"]["detail"]) == ("running", detail)
    work = submitted.registry.work(submitted.submission)
    (task,) = work.bundles[0].tasks
    together = replace(task, experiments=(*task.experiments, submitted.experiments["b"]))
    replace(work, bundles=(replace(work.bundles[0], tasks=(together,)),)).save(submitted.folder)
    logs = submitted.folder / "logs" / "0" / submitted.experiments["a"].key
    logs.mkdir(parents=True)
    (logs / "rank-0.err").write_text("log of both cases")
    assert cli.main(["logs", "b", "--rank", "0", "--results", str(submitted.results)]) == 0
    assert "log of both cases" in capsys.readouterr().out


def test_preempted_case_is_requeued_with_its_reason(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted.record("a", "interrupted", "preempted")
    stopped = {"signal": "SIGUSR2", "reason": "preempted or near its time limit"}
    submitted.report(0, phase="stopped", stopped=stopped)
    submitted.slurm.job("12_0", state="PENDING", reason="BeginTime", nodes="")
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["detail"]) == ("requeued", "preempted or near its time limit, BeginTime")
    submitted.report(
        0, restarts=1, phase="running", current={"names": ["a"], "case": "a", "step": 1, "steps": 6}
    )
    submitted.slurm.job("12_0", state="RUNNING", reason="None", nodes="n1")
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["restarts"]) == ("running", 1)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (
            JobState(state="NODE_FAIL", nodes="n[1-2]", exit_code="1:9", reason="NodeDown"),
            ("interrupted", "node failure, on n[1-2], exit code 1:9, NodeDown"),
        ),
        (
            JobState(state="FAILED", exit_code="0:0", reason="NonZeroExitCode"),
            ("error", "the job ended as FAILED without a record"),
        ),
        (None, ("error", "lost: SLURM no longer lists the job, and the job wrote no record")),
    ],
)
def test_job_state_determines_outcome_without_record(job: JobState | None, expected: tuple[str, str]) -> None:
    assert outcome_without_record(job) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["done", "done"], 0),
        (["done", "failed"], 1),
        (["cancelled"], 1),
        (["not submitted"], 1),
        (["failed", "pending"], 3),
        (["requeued"], 3),
        (["running", "done"], 3),
        ([], 0),
    ],
)
def test_status_exit_code_follows_from_case_states(states: list[str], expected: int) -> None:
    known = {"submission": "x", "suite": "s", "name": "a", "key": "k", "bundle": 0, "job": "12"}
    assert status_exit_code([CaseState(**known, state=state) for state in states]) == expected


def test_job_unknown_to_slurm_is_lost(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.slurm.set(jobs={})
    found = submitted.status(capsys)
    assert {case["state"] for case in found.values()} == {"lost"}
    assert "no longer lists the job" in found["a"]["detail"]


def test_older_records_do_not_count_for_new_submissions(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = submitted.record("a", "error", "an older run")
    later = datetime.now(timezone.utc).isoformat()
    submitted.registry.write(Submission(**{**vars(submitted.submission), "created": later}))
    assert submitted.status(capsys)["a"]["state"] == "running"
    assert experiment.key in latest(submitted.results)


def test_record_order_does_not_depend_on_node_clocks(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records after the newest record at submission belong to the submission, whatever their times are."""
    submitted.record("a", "error", "an older run")
    with Store(submitted.results) as store:
        store.records()
        later = replace(submitted.submission, created="9999-01-01T00:00:00+00:00", newest_record=store.newest)
    submitted.registry.write(later)
    submitted.record("b", "ok")
    submitted.slurm.set(jobs={})
    found = submitted.status(capsys)
    assert {name: found[name]["recorded"] for name in "abc"} == {"a": False, "b": True, "c": False}
    assert found["b"]["state"] == "done"


def test_status_contains_all_case_fields(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown fields are empty."""
    submitted.slurm.job("12_0", state="PENDING", reason="JobHeldUser", nodes="")
    case = {"submission": "x", "suite": "faults", "job_state": "PENDING", "nodes": "", "restarts": 0}
    assert submitted.status(capsys)["a"] == {
        **case,
        "name": "a",
        "key": submitted.experiments["a"].key,
        "bundle": 0,
        "job": "12_0",
        "state": "pending",
        "detail": "JobHeldUser, `scontrol release 12_0` releases the job",
        "outcome": "",
        "recorded": False,
        "failure": "",
    }
    known = {
        "submission": "x",
        "suite": "s",
        "name": "a",
        "key": "k",
        "bundle": 0,
        "job": "12",
        "state": "done",
    }
    empty = dict.fromkeys(("detail", "outcome", "job_state", "nodes", "failure"), "")
    assert CaseState(**known).as_dict() == {**known, **empty, "restarts": 0, "recorded": False}  # type: ignore[arg-type]
    submitted.report(
        0, restarts=3, nodes=["n4", "n5"], phase="running", current={"names": ["a"], "case": "a"}
    )
    submitted.slurm.job("12_0", state="RUNNING", reason="None", nodes="")
    found = submitted.status(capsys)["a"]
    assert (found["restarts"], found["nodes"], found["detail"]) == (3, "n4,n5", "step 0 of 0, ")


def test_lost_case_names_interrupt_and_job_end(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted.record("a", "interrupted", "preempted at step 3")
    submitted.slurm.job("12_0", state="TIMEOUT", reason="None")
    limit = "the job reached its time limit (slurm.time_limit of the profile), on n1"
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["outcome"]) == ("lost", "interrupted")
    assert found["detail"] == f"preempted at step 3; {limit}"
    submitted.slurm.set(jobs={})
    assert submitted.status(capsys)["a"]["detail"] == "preempted at step 3"


def test_status_table_shows_failures(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.record("a", "hang", "no progress for 2 s: rank 1 is behind [at step 3]")
    submitted.record("b", "ok")
    assert cli.main(["status", "--results", str(submitted.results)]) == 3
    out = capsys.readouterr().out
    assert "failed: hang" in out
    assert "[at step 3]" in " ".join(out.split())
    assert "faults: 3 cases: 1 running, 1 done, 1 failed" in out


def test_damaged_submission_file_is_named(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    (submitted.folder / "submission.json").write_text("{")
    assert cli.main(["status", "--results", str(submitted.results)]) == 2
    assert "submission.json" in capsys.readouterr().err


def test_cancel_selects_by_case_or_suite(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(submitted.results)]
    assert cli.main(["cancel", "nothing", *results]) == 2
    assert "a suite, submission or case that waits or runs: a, b, c" in capsys.readouterr().err
    assert cli.main(["cancel", "b", *results]) == 0
    assert submitted.slurm.calls("scancel") == [["12_1"]]
    assert submitted.status(capsys)["b"]["state"] == "cancelled"
    assert cli.main(["cancel", "faults", *results]) == 0
    assert submitted.slurm.calls("scancel")[1:] == [["12_0", "12_2"]]
