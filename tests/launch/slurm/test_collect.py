"""Tests of `repro collect`: records of jobs that wrote none, copies in another folder, and the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro import cli
from repro.launch.slurm.case_states import CaseState
from repro.launch.slurm.commands import count_bad_nodes
from tests.launch.slurm.submitted import ThreeCases
from tests.records import latest, lines


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
def test_job_without_a_record_is_recorded_once(
    submitted: ThreeCases,
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
    for attempt in range(2):
        assert cli.main(["collect", "--results", str(submitted.results), "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert document["recorded"] == ([] if attempt else ["a"])
        assert document["records"] == 3
    record = latest(submitted.results)[submitted.experiments["a"].key]
    assert record["outcome"] in ("interrupted", "error")
    assert record["wall_s"] == 0, "the duration is unknown"
    assert record["provenance"]["slurm"]["state"] == job["state"]
    assert document["bad_nodes"] == ({"n1": 1} if failure == "node-failure" else {})
    found = submitted.status(capsys)["a"]  # the new record has the same class
    assert found["failure"] == failure


def test_node_failures_are_counted_per_node() -> None:
    """The reason of a node failure names nodes; without names, all nodes of the case count."""

    def case(reason: str, nodes: str = "n[1-3]", outcome: str = "error") -> CaseState:
        fields = {"submission": "x", "suite": "s", "name": "a", "key": "k", "bundle": 0, "job": "12"}
        return CaseState(**fields, state="failed", detail=reason, outcome=outcome, nodes=nodes)

    cases = [
        case("lost node n2: no answer from the node for 15 s"),
        case("node failure of n2, n3", outcome="interrupted"),
        case("wrong hardware: all of them"),
        case("rank 0: n1 is bad"),
        case("lost node", nodes=""),
    ]
    assert count_bad_nodes(cases) == {"n2": 3, "n3": 2, "n1": 1}


def test_collect_copies_records_to_another_folder_once(
    submitted: ThreeCases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        submitted.record(name, "ok")
    damaged = next(submitted.results.glob("records/*.jsonl"))
    damaged.write_bytes(damaged.read_bytes() + b'{"half": ')
    for copied in (3, 0):
        arguments = ["--results", str(submitted.results), "--into", str(tmp_path / "mine"), "--json"]
        assert cli.main(["collect", *arguments]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["copied"] == copied
        assert "incomplete record" in document["skipped_lines"][0]
    assert len(lines(tmp_path / "mine")) == 3


def test_collect_prints_totals_failures_and_bad_nodes(
    submitted: ThreeCases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted.record("a", "hang", "rank 1 is behind")
    submitted.slurm.job("12_1", state="NODE_FAIL", reason="NodeDown")
    results = ["--results", str(submitted.results)]
    target = tmp_path / "mine"
    assert cli.main(["collect", *results, "--into", str(target)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "0 of 3 cases done, 1 waiting or running, 1 lost or cancelled and recorded.",
        f"2 records in {submitted.results}/records.",
        f"2 of the records are new in {target}/records.",
        "1 failure on node n1; use `repro submit --exclude n1`.",
        "a: hang: rank 1 is behind.",
        "b: node-failure: node failure, on n1, NodeDown.",
    ]
    for name in "abc":
        submitted.record(name, "ok")
    assert cli.main(["collect", *results]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 of 3 cases done, 0 waiting or running, 0 lost or cancelled and recorded.",
        f"5 records in {submitted.results}/records.",
    ]
    assert cli.main(["collect", "--results", str(tmp_path / "none")]) == 2
    assert "a folder that `repro submit` has used" in capsys.readouterr().err
