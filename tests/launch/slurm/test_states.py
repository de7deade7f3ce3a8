"""Where cases stand, from every mixture of what SLURM, the job and the store say; and what collect records."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from repro import cli, suites
from repro.config import Experiment
from repro.host.files import write_json
from repro.launch import plan
from repro.launch.slurm.allocation.work import SubmissionWork
from repro.launch.slurm.following import logs
from repro.launch.slurm.following.collect import bad_nodes
from repro.launch.slurm.following.registry import Registry, Submission, Submitted
from repro.launch.slurm.following.states import CaseState, meaning
from repro.launch.slurm.following.status import code
from repro.launch.slurm.site import profile
from repro.launch.slurm.site.scheduler import JobState
from repro.launch.slurm.submission.pack import arrays
from repro.results.measured import experiment_record
from repro.results.store import Store
from tests.launch.runs import experiments, write_suite
from tests.launch.slurm.conftest import FakeSlurm
from tests.records import latest, lines

JOB = {"state": "RUNNING", "reason": "None", "nodes": "n1", "exit": "0:0"}


class Submitted1:
    """A suite with the cases a, b, c as elements 12_0 to 12_2, written as `repro submit` writes it."""

    def __init__(self, folder: Path, site: Path, slurm: FakeSlurm):
        self.results, self.slurm = folder / "results", slurm
        suite = suites.load(write_suite(folder, experiments("a", "b", "c")))
        tasks = plan.tasks(suite, list(suite.entries), Store(self.results), rerun=False)
        (array,) = arrays(tasks, profile.load(site))
        self.registry = Registry(self.results)
        row = Submitted(
            bundles=[0, 1, 2],
            nodes=1,
            tasks_per_node=2,
            time_limit_s=1800,
            partition="debug",
            job_name="repro-x-0",
            job_id="12",
        )
        self.submission = Submission(
            id="x",
            created=datetime.now(timezone.utc).isoformat(),
            suite=suite.name,
            suite_file=suite.file,
            profile=str(site),
            system="local",
            arrays=[row],
        )
        self.registry.write(self.submission)
        self.folder = self.registry.path("x")
        SubmissionWork(suite=suite, bundles=array.bundles, rerun=False).save(self.folder)
        self.experiments = {entry.experiment.name: entry.experiment for entry in suite.entries}
        slurm.set(jobs={f"12_{i}": JOB for i in range(3)})

    def says(self, bundle: int, **state: Any) -> None:
        """What the allocation of a bundle writes about itself."""
        start = {"restarts": 0, "nodes": ["n1"], "current": None, "stopped": None}
        write_json(self.folder / f"bundle-{bundle}.json", start | state)

    def record(self, name: str, outcome: str, reason: str = "") -> Experiment:
        """A record of a case."""
        with Store(self.results) as store:
            store.append(
                experiment_record(
                    self.experiments[name],
                    [],
                    suite="faults",
                    provenance={},
                    wall_s=1.0,
                    outcome=outcome,
                    reason=reason,
                )
            )
        return self.experiments[name]

    def status(self, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
        """`repro status` by case."""
        capsys.readouterr()
        cli.main(["status", "--results", str(self.results), "--json"])
        return {case["name"]: case for case in json.loads(capsys.readouterr().out)["cases"]}


@pytest.fixture
def submitted(tmp_path: Path, site: Path, slurm: FakeSlurm) -> Submitted1:
    return Submitted1(tmp_path, site, slurm)


def test_a_case_waits_runs_and_is_done(submitted: Submitted1, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.slurm.job("12_0", state="PENDING", reason="Resources", nodes="")
    place = {"names": ["b"], "case": "b", "step": 3, "steps": 6, "phase": "backward", "steps_per_s": 1.5}
    submitted.says(1, phase="running", current=place)
    submitted.record("c", "ok")
    found = submitted.status(capsys)
    assert (found["a"]["state"], found["a"]["detail"]) == ("pending", "Resources")
    assert (found["b"]["state"], found["b"]["detail"]) == ("running", "step 3 of 6, backward, 1.50 steps/s")
    assert (found["c"]["state"], found["c"]["outcome"]) == ("done", "ok")


@pytest.mark.parametrize(
    ("compare", "detail"), [(True, "takes turns with b"), (False, "its job runs, its turn comes")]
)
def test_cases_that_share_a_launch(
    submitted: Submitted1, capsys: pytest.CaptureFixture[str], compare: bool, detail: str
) -> None:
    """One of them is where the ranks are; its logs are those of the launch."""
    place = {"names": ["a", "b"], "case": "b", "compare": compare, "step": 3, "steps": 6, "phase": "backward"}
    submitted.says(0, phase="running", current=place)
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
    submitted: Submitted1, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted.record("a", "interrupted", "preempted")
    stopped = {"signal": "SIGUSR2", "reason": "preempted or near its time limit"}
    submitted.says(0, phase="stopped", stopped=stopped)
    submitted.slurm.job("12_0", state="PENDING", reason="BeginTime", nodes="")
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["detail"]) == ("requeued", "preempted or near its time limit, BeginTime")
    submitted.says(
        0, restarts=1, phase="running", current={"names": ["a"], "case": "a", "step": 1, "steps": 6}
    )
    submitted.slurm.job("12_0", state="RUNNING", reason="None", nodes="n1")
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["restarts"]) == ("running", 1)


@pytest.mark.parametrize(
    ("job", "state", "failure"),
    [
        ({"state": "CANCELLED"}, "cancelled", "cancelled"),
        ({"state": "NODE_FAIL"}, "lost", "node-failure"),
        ({"state": "TIMEOUT"}, "lost", "time-limit"),
        ({"state": "OUT_OF_MEMORY"}, "lost", "out-of-memory"),
        ({"state": "PREEMPTED"}, "lost", "preempted"),
        ({"state": "FAILED", "exit": "1:0"}, "lost", "error"),
    ],
)
def test_a_job_that_left_no_record_is_collected_once(
    submitted: Submitted1,
    capsys: pytest.CaptureFixture[str],
    job: dict[str, str],
    state: str,
    failure: str,
) -> None:
    for name in ("b", "c"):
        submitted.record(name, "ok")
    submitted.slurm.job("12_0", **job)
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["failure"], found["recorded"]) == (state, failure, False)
    for turn in range(2):
        assert cli.main(["collect", "--results", str(submitted.results), "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert document["recorded"] == ([] if turn else ["a"])
        assert document["records"] == 3
    record = latest(submitted.results)[submitted.experiments["a"].key]
    assert record["outcome"] in ("interrupted", "error")
    assert record["provenance"]["slurm"]["state"] == job["state"]
    assert document["bad_nodes"] == ({"n1": 1} if failure == "node-failure" else {})
    found = submitted.status(capsys)["a"]  # and it still says the same
    assert found["failure"] == failure


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
        (None, ("error", "lost: SLURM does not know the job any more and it left no record")),
    ],
)
def test_all_that_slurm_says_of_an_end_is_in_the_reason(
    job: JobState | None, expected: tuple[str, str]
) -> None:
    assert meaning(job) == expected


def test_nodes_that_failures_name_are_counted() -> None:
    """Those that the reason names, or all of the case where it names none; what is no fault of a node counts not."""

    def case(reason: str, nodes: str = "n[1-3]", outcome: str = "error") -> CaseState:
        words = {"submission": "x", "suite": "s", "name": "a", "key": "k", "bundle": 0, "job": "12"}
        return CaseState(**words, state="failed", detail=reason, outcome=outcome, nodes=nodes)

    cases = [
        case("lost node n2: no answer from it for 15 s"),
        case("node failure of n2, n3", outcome="interrupted"),
        case("wrong hardware: all of them"),
        case("rank 0: n1 is bad"),
        case("lost node", nodes=""),
    ]
    assert bad_nodes(cases) == {"n2": 3, "n3": 2, "n1": 1}


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
    assert code([CaseState(**words, state=state) for state in states]) == expected


def test_a_job_that_nobody_knows_is_lost(submitted: Submitted1, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.slurm.set(jobs={})
    found = submitted.status(capsys)
    assert {case["state"] for case in found.values()} == {"lost"}
    assert "does not know the job any more" in found["a"]["detail"]


def test_older_records_do_not_speak_for_a_new_submission(
    submitted: Submitted1, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = submitted.record("a", "error", "an older run")
    later = datetime.now(timezone.utc).isoformat()
    submitted.registry.write(Submission(**{**vars(submitted.submission), "created": later}))
    assert submitted.status(capsys)["a"]["state"] == "running"
    assert experiment.key in latest(submitted.results)


def test_cancel_takes_a_case_a_suite_or_all(
    submitted: Submitted1, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(submitted.results)]
    assert cli.main(["cancel", "nothing", *results]) == 2
    assert "a suite, submission or case that waits or runs: a, b, c" in capsys.readouterr().err
    assert cli.main(["cancel", "b", *results]) == 0
    assert submitted.slurm.calls("scancel") == [["12_1"]]
    assert submitted.status(capsys)["b"]["state"] == "cancelled"
    assert cli.main(["cancel", "faults", *results]) == 0
    assert submitted.slurm.calls("scancel")[1:] == [["12_0", "12_2"]]


def test_collect_brings_records_to_another_folder_once(
    submitted: Submitted1, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        submitted.record(name, "ok")
    torn = next(submitted.results.glob("records/*.jsonl"))
    torn.write_bytes(torn.read_bytes() + b'{"half": ')
    for copied in (3, 0):
        arguments = ["--results", str(submitted.results), "--into", str(tmp_path / "mine"), "--json"]
        assert cli.main(["collect", *arguments]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["copied"] == copied
        assert "torn record" in document["skipped_lines"][0]
    assert len(lines(tmp_path / "mine")) == 3


def test_logs_of_a_rank_and_of_the_job(submitted: Submitted1, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(submitted.results)]
    logs = submitted.folder / "logs" / "1" / submitted.experiments["b"].key
    logs.mkdir(parents=True)
    (logs / "rank-1.err").write_text("x" * 9000 + "the end\n")
    assert cli.main(["logs", "b", "--rank", "1", *results]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("the end")
    assert "last 8000 of 9008 bytes" in out
    assert cli.main(["logs", "b", *results]) == 0
    assert "ranks: 1; --rank R shows one" in capsys.readouterr().out
    assert cli.main(["logs", "d", *results]) == 2
    assert "case = 'd': must be a submitted case: a, b, c" in capsys.readouterr().err
    assert cli.main(["logs", "b", "--rank", "2", *results]) == 2


def test_few_names_are_all_shown_and_of_many_the_nearest() -> None:
    assert logs.some("x", ["a", "b", "a"]) == "a, b"
    names = [f"case-{i}" for i in range(500)]
    assert logs.some("case-77x", names).startswith("case-77, ")
    assert logs.some("case-77x", names).endswith(" (8 of 500)")


def test_what_collect_says_to_people(
    submitted: Submitted1, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted.record("a", "hang", "rank 1 is behind")
    submitted.slurm.job("12_1", state="NODE_FAIL", reason="NodeDown")
    results = ["--results", str(submitted.results)]
    mine = tmp_path / "mine"
    assert cli.main(["collect", *results, "--into", str(mine)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a: hang: rank 1 is behind",
        "b: node-failure: node failure, on n1, NodeDown",
        "node n1 is named in 1 failure: `repro submit --exclude n1` keeps away from it",
        "0 of 3 cases done, 1 still wait or run; 1 lost or cancelled ones recorded now",
        f"2 records in {submitted.results}/records",
        f"2 of them are new in {mine}/records",
    ]
    for name in "abc":
        submitted.record(name, "ok")
    assert cli.main(["collect", *results]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 of 3 cases done; 0 lost or cancelled ones recorded now",
        f"5 records in {submitted.results}/records",
    ]
    assert cli.main(["collect", "--results", str(tmp_path / "none")]) == 2
    assert "a folder that `repro submit` has used" in capsys.readouterr().err


def test_what_logs_prints(submitted: Submitted1, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(submitted.results)]

    def printed(*asked: str) -> list[str]:
        assert cli.main(["logs", *asked, *results]) == 0
        return capsys.readouterr().out.splitlines()

    assert printed("b") == ["no log: job 12_1 of b"]
    assert printed("b", "--rank", "0") == [
        "no log: rank 0 of b (logs are kept while it runs, and of failures)"
    ]
    (submitted.folder / "submitit").mkdir()
    for end, text in (("out", "fine\n\n"), ("err", "x" * 8000)):
        (submitted.folder / "submitit" / f"12_1_0_log.{end}").write_text(text)
    ranks = submitted.folder / "logs" / "1" / submitted.experiments["b"].key
    ranks.mkdir(parents=True)
    for rank in (10, 9, 0):
        (ranks / f"rank-{rank}.err").write_text(f"error {rank}")
    (ranks / "rank-0.out").write_text("out 0")
    job = submitted.folder / "submitit" / "12_1_0_log"
    assert printed("b") == [
        f"==> {job}.err",
        "x" * 8000,
        f"==> {job}.out",
        "fine",
        "ranks: 0, 9, 10; --rank R shows one",
    ]
    assert printed("b", "--rank", "0") == [
        f"==> {ranks}/rank-0.out",
        "out 0",
        f"==> {ranks}/rank-0.err",
        "error 0",
    ]
    (submitted.folder / "submitit" / "12_1_0_log.err").write_text("x" * 8001)
    assert printed("b")[:2] == [f"==> {job}.err (last 8000 of 8001 bytes)", "x" * 8000]
    for rank in ("2", "-1"):
        assert cli.main(["logs", "b", f"--rank={rank}", *results]) == 2
        assert "0 to 1" in capsys.readouterr().err


def test_all_that_is_known_of_a_case(submitted: Submitted1, capsys: pytest.CaptureFixture[str]) -> None:
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
        "detail": "JobHeldUser, `scontrol release 12_0` lets it start",
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
    submitted.says(0, restarts=3, nodes=["n4", "n5"], phase="running", current={"names": ["a"], "case": "a"})
    submitted.slurm.job("12_0", state="RUNNING", reason="None", nodes="")
    found = submitted.status(capsys)["a"]
    assert (found["restarts"], found["nodes"], found["detail"]) == (3, "n4,n5", "step 0 of 0, ")


def test_a_case_that_stopped_itself_and_did_not_start_again_says_both(
    submitted: Submitted1, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted.record("a", "interrupted", "preempted at step 3")
    submitted.slurm.job("12_0", state="TIMEOUT", reason="None")
    limit = "the job reached its time limit (slurm.time_limit of the profile), on n1"
    found = submitted.status(capsys)["a"]
    assert (found["state"], found["outcome"]) == ("lost", "interrupted")
    assert found["detail"] == f"preempted at step 3; {limit}"
    submitted.slurm.set(jobs={})
    assert submitted.status(capsys)["a"]["detail"] == "preempted at step 3"


def test_a_submissions_name_sorts_by_time_and_says_what_it_is(submitted: Submitted1) -> None:
    made = submitted.registry.new_id("a suite: of / signs" + "x" * 60)
    time, clean, digits = re.fullmatch(r"(\d{8}T\d{6}Z)-(.{40})-([0-9a-f]+)", made).groups()  # type: ignore[union-attr]
    assert clean == "a-suite-of-signs" + "x" * 24
    assert len(digits) == 4
    at = datetime.strptime(time, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    assert abs((datetime.now(timezone.utc) - at).total_seconds()) < 60
    array = submitted.submission.arrays[0]
    assert submitted.submission.jobs() == {0: "12_0", 1: "12_1", 2: "12_2"}
    assert replace(array, bundles=[4]).element(0) == "12"
    waiting = replace(submitted.submission, arrays=[array, replace(array, bundles=[3, 4], job_id="")])
    assert waiting.jobs() == {0: "12_0", 1: "12_1", 2: "12_2", 3: "", 4: ""}
    assert waiting.with_job(1, "13").jobs() == {0: "12_0", 1: "12_1", 2: "12_2", 3: "13_0", 4: "13_1"}


def test_damage_is_one_line(submitted: Submitted1, capsys: pytest.CaptureFixture[str]) -> None:
    (submitted.folder / "submission.json").write_text("{")
    assert cli.main(["status", "--results", str(submitted.results)]) == 2
    assert "submission.json" in capsys.readouterr().err


def test_the_table_is_for_people(submitted: Submitted1, capsys: pytest.CaptureFixture[str]) -> None:
    submitted.record("a", "hang", "no progress for 2 s: rank 1 is behind [at step 3]")
    submitted.record("b", "ok")
    assert cli.main(["status", "--results", str(submitted.results)]) == 3
    out = capsys.readouterr().out
    assert "failed: hang" in out
    assert "[at step 3]" in " ".join(out.split())
    assert "faults: 3 cases: 1 running, 1 done, 1 failed" in out
