"""Where cases stand, from every mixture of what SLURM, the job and the store say; and what `repro cancel` reaches."""

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


def test_a_case_waits_runs_and_is_done(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.slurm.job("12_0", state="PENDING", reason="Resources", nodes="")
    place = {"names": ["b"], "case": "b", "step": 3, "steps": 6, "phase": "backward", "steps_per_s": 1.5}
    submitted.write_progress(1, phase="running", current=place)
    submitted.record("c", "ok")
    found = submitted.status(capsys)
    assert (found["a"]["state"], found["a"]["detail"]) == ("pending", "Resources")
    assert (found["b"]["state"], found["b"]["detail"]) == ("running", "step 3 of 6, backward, 1.50 steps/s")
    assert (found["c"]["state"], found["c"]["outcome"]) == ("done", "ok")


@pytest.mark.parametrize(
    ("compare", "detail"), [(True, "takes turns with b"), (False, "its job runs other cases first")]
)
def test_cases_that_share_a_launch(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str], compare: bool, detail: str
) -> None:
    """One of them is where the ranks are; its logs are those of the launch."""
    place = {"names": ["a", "b"], "case": "b", "compare": compare, "step": 3, "steps": 6, "phase": "backward"}
    submitted.write_progress(0, phase="running", current=place)
    found = submitted.status(capsys)
    assert (found["a"]["state"], found["a"]["detail"]) == ("running", detail)
    work = submitted.registry.work(submitted.submission)
    (task,) = work.bundles[0].tasks
    together = replace(task, experiments=(*task.experiments, submitted.experiments["b"]))
    replace(work, bundles=(replace(work.bundles[0], tasks=(together,)),)).save(submitted.folder)
    logs = submitted.folder / "logs" / "0" / submitted.experiments["a"].key
    logs.mkdir(parents=True)
    (logs / "rank-0.err").write_text("where both are")
    assert cli.main(["logs", "b", "--rank", "0", "--results", str(submitted.results)]) == 0
    assert "where both are" in capsys.readouterr().out


def test_a_preempted_case_is_requeued_and_says_why(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted.record("a", "interrupted", "preempted")
    stopped = {"signal": "SIGUSR2", "reason": "preempted or near its time limit"}
    submitted.write_progress(0, phase="stopped", stopped=stopped)
    submitted.slurm.job("12_0", state="PENDING", reason="BeginTime", nodes="")
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["detail"]) == ("requeued", "preempted or near its time limit, BeginTime")
    submitted.write_progress(
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
def test_all_that_slurm_says_of_an_end_is_in_the_reason(
    job: JobState | None, expected: tuple[str, str]
) -> None:
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
def test_the_exit_code_says_whether_it_is_over(states: list[str], expected: int) -> None:
    words = {"submission": "x", "suite": "s", "name": "a", "key": "k", "bundle": 0, "job": "12"}
    assert status_exit_code([CaseState(**words, state=state) for state in states]) == expected


def test_a_job_that_nobody_knows_is_lost(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.slurm.set(jobs={})
    found = submitted.status(capsys)
    assert {case["state"] for case in found.values()} == {"lost"}
    assert "no longer lists the job" in found["a"]["detail"]


def test_older_records_do_not_speak_for_a_new_submission(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = submitted.record("a", "error", "an older run")
    later = datetime.now(timezone.utc).isoformat()
    submitted.registry.write(Submission(**{**vars(submitted.submission), "created": later}))
    assert submitted.status(capsys)["a"]["state"] == "running"
    assert experiment.key in latest(submitted.results)


def test_the_clock_of_a_node_may_be_behind_that_of_the_submission(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    """A submission of which the newest older record is known: later ones are its own, whatever their times are."""
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


def test_all_that_is_known_of_a_case(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    """What was never said is empty or none."""
    submitted.slurm.job("12_0", state="PENDING", reason="JobHeldUser", nodes="")
    case = {"submission": "x", "suite": "faults", "job_state": "PENDING", "nodes": "", "restarts": 0}
    assert submitted.status(capsys)["a"] == {
        **case,
        "name": "a",
        "key": submitted.experiments["a"].key,
        "bundle": 0,
        "job": "12_0",
        "state": "pending",
        "detail": "JobHeldUser, `scontrol release 12_0` releases it",
        "outcome": "",
        "recorded": False,
        "failure": "",
    }
    words = {
        "submission": "x",
        "suite": "s",
        "name": "a",
        "key": "k",
        "bundle": 0,
        "job": "12",
        "state": "done",
    }
    empty = dict.fromkeys(("detail", "outcome", "job_state", "nodes", "failure"), "")
    assert CaseState(**words).as_dict() == {**words, **empty, "restarts": 0, "recorded": False}  # type: ignore[arg-type]
    submitted.write_progress(
        0, restarts=3, nodes=["n4", "n5"], phase="running", current={"names": ["a"], "case": "a"}
    )
    submitted.slurm.job("12_0", state="RUNNING", reason="None", nodes="")
    found = submitted.status(capsys)["a"]
    assert (found["restarts"], found["nodes"], found["detail"]) == (3, "n4,n5", "step 0 of 0, ")


def test_a_case_that_stopped_itself_and_did_not_start_again_says_both(
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


def test_the_table_is_for_people(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.record("a", "hang", "no progress for 2 s: rank 1 is behind [at step 3]")
    submitted.record("b", "ok")
    assert cli.main(["status", "--results", str(submitted.results)]) == 3
    out = capsys.readouterr().out
    assert "failed: hang" in out
    assert "[at step 3]" in " ".join(out.split())
    assert "faults: 3 cases: 1 running, 1 done, 1 failed" in out


def test_damage_is_one_line(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    (submitted.folder / "submission.json").write_text("{")
    assert cli.main(["status", "--results", str(submitted.results)]) == 2
    assert "submission.json" in capsys.readouterr().err


def test_cancel_takes_a_case_a_suite_or_all(
    submitted: ThreeCases, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(submitted.results)]
    assert cli.main(["cancel", "nothing", *results]) == 2
    assert "a suite, submission or case that waits or runs: a, b, c" in capsys.readouterr().err
    assert cli.main(["cancel", "b", *results]) == 0
    assert submitted.slurm.calls("scancel") == [["12_1"]]
    assert submitted.status(capsys)["b"]["state"] == "cancelled"
    assert cli.main(["cancel", "faults", *results]) == 0
    assert submitted.slurm.calls("scancel")[1:] == [["12_0", "12_2"]]
