"""Tests of suites with experiments for a cluster: `repro run` starts only experiments that fit this machine."""

from __future__ import annotations

import json
from pathlib import Path

from repro.config import suites
from repro.results.store import Store
from tests.launch.runs import experiments, run, write_suite
from tests.records import lines, made_up

CLUSTER_EXPERIMENT = '[[experiment]]\nname = "full"\nsystem = "selene"\nlayout.dp = 3072\n'
REASON = "needs 3072 GPUs of system selene; `--evidence simulated` simulates the experiment here"


def test_experiments_for_a_cluster_are_listed_but_not_started(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, CLUSTER_EXPERIMENT + experiments("twin"))
    code, out, err = run(suite, tmp_path / "results")
    assert code == 0, err
    assert out.splitlines()[:3] == [
        "faults: 2 experiments: 1 not run, 1 ok; all that can run here as expected",
        "not run: 1 experiment: needs 3072 GPUs of system selene.",
        "`--evidence simulated` can simulate 1 of these experiments on this machine.",
    ]
    records = lines(tmp_path / "results")
    assert [(record["name"], record["outcome"]) for record in records] == [("twin", "ok")]


def test_json_summary_lists_failures_and_experiments_for_a_cluster(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, CLUSTER_EXPERIMENT + experiments("twin"))
    code, out, _ = run(suite, tmp_path / "results", "--json", FAKE_FAULT="raise:twin:1:2")
    assert code == 1
    rows = {row["name"]: row for row in json.loads(out)["experiments"]}
    assert (rows["full"]["expected"], rows["full"]["reason"]) == (None, REASON)
    assert (rows["twin"]["expected"], rows["twin"]["outcome"]) == (False, "error")


def test_record_of_a_cluster_experiment_is_shown(tmp_path: Path) -> None:
    path = write_suite(tmp_path, CLUSTER_EXPERIMENT + experiments("twin"))
    experiment = suites.load_suite(path).entry("full").experiment
    with Store(tmp_path / "results") as store:
        store.append(made_up("full", key=experiment.key, suite="faults"))
    code, out, _ = run(path, tmp_path / "results", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)["experiments"]}
    assert (rows["full"]["outcome"], rows["full"]["expected"]) == ("ok", True)
