"""Tests of `repro logs`, `repro cancel` and `repro collect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro import cli
from repro.launch.slurm import commands
from repro.launch.slurm.case_states import CaseState
from tests.launch.slurm.conftest import ThreeCases
from tests.records import latest, lines


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


@pytest.mark.parametrize(
    ("job", "state", "failure"),
    [
        ({"state": "CANCELLED"}, "cancelled", "cancelled"),
        ({"state": "NODE_FAIL"}, "lost", "node-failure"),
        ({"state": "FAILED", "exit": "1:0"}, "lost", "error"),
    ],
)
def test_job_without_a_record_is_recorded_once(
    submitted: ThreeCases, job: dict[str, str], state: str, failure: str
) -> None:
    for name in ("b", "c"):
        submitted.record(name, "ok")
    submitted.slurm.job("12_0", **job)
    assert submitted.row("a", "state", "failure", "recorded") == (state, failure, False)
    for recorded in (["a"], []):
        code, out, _ = submitted.repro("collect", "--json")
        document = json.loads(out)
        assert (code, document["recorded"], document["records"]) == (1, recorded, 3)
        assert document["cases"][0]["failure"] == failure, "the new record has the same class"
    record = latest(submitted.results)[submitted.experiments["a"].key]
    assert record["outcome"] == ("error" if failure == "error" else "interrupted")
    assert record["wall_s"] == 0, "the duration is unknown"
    assert record["provenance"]["slurm"]["state"] == job["state"]
    assert document["bad_nodes"] == ({"n1": 1} if failure == "node-failure" else {})


def test_node_failures_are_counted_per_node() -> None:
    """The reason of a node failure names nodes; without names, all nodes of the case count."""
    known = {"submission": "x", "suite": "s", "name": "a", "key": "k", "bundle": 0, "job": "12"}
    cases = [
        CaseState(**known, state="failed", detail=reason, outcome=outcome, nodes=nodes)
        for reason, outcome, nodes in (
            ("lost node n2: no answer from the node for 15 s", "error", "n[1-3]"),
            ("node failure of n2, n3", "interrupted", "n[1-3]"),
            ("wrong hardware: all of them", "error", "n[1-3]"),
            ("rank 0: n1 is bad", "error", "n[1-3]"),
            ("lost node", "error", ""),
        )
    ]
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
