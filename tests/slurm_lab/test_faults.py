"""What clusters do to jobs, provoked for real: the right class, nothing lost, only what was interrupted runs again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_lab.bench import Bench, case, ranks
from tests.slurm_lab.cluster import Lab, started

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


def three(bench: Bench) -> Path:
    """A suite of cases a, b, c of two ranks each; b stays in its second step."""
    bench.hold("b")
    tables = (case(name, "dp = 2", seed=seed) for seed, name in enumerate("abc"))
    return bench.suite(*tables)


def one_job(lab: Lab, folder: Path, **slurm: Any) -> Bench:
    """A bench whose cases follow each other in one allocation of two nodes."""
    return Bench(lab, folder, {"cases_per_job": 3, **slurm})


def only_b_again(bench: Bench, why: str) -> None:
    """b was interrupted once, for `why`, and ran again whole; a and c ran once."""
    status = bench.ended()
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert bench.begun() == ["a", "b", "b", "c"]
    assert bench.outcomes("a") == bench.outcomes("c") == ["ok"]
    assert bench.outcomes("b")[-1] == "ok"
    for record in bench.records():
        if record["outcome"] == "interrupted":
            assert why in record["reason"]
    assert bench.latest()["b"]["provenance"]["slurm"]["restarts"] == 1
    assert len(bench.latest()["b"]["series"]["loss"]) == 4, "a whole run, not the rest of one"
    assert {row["restarts"] for row in status.values()} == {1}
    assert bench.repro("collect").returncode == 0


def test_preempted_in_mid_suite(lab: Lab, tmp_path: Path) -> None:
    bench = one_job(lab, tmp_path)
    bench.submit(three(bench))
    bench.running_step("b")
    with lab.background(["exec"], ["srun", "-p", "high", "-N4", "--exclusive", "sleep", "2"]) as high:
        lab.wait_for("b has made way", lambda: bench.states()["b"] == "requeued")
        status = bench.status()
        assert "preempted" in status["b"]["detail"]
        assert status["a"]["state"] == "done"
        assert high.wait(timeout=30) == 0
    bench.release("b")
    only_b_again(bench, "preempted")
    assert bench.outcomes("b") == ["interrupted", "ok"]


def test_time_limit_in_mid_suite(lab: Lab, tmp_path: Path) -> None:
    """SLURM's warning comes up to 15 s before the 20 s that were asked for."""
    bench = one_job(lab, tmp_path, time_limit="00:01:00", signal_delay_s=20)
    bench.submit(three(bench))
    bench.running_step("b")
    lab.wait_for("the warning", lambda: bench.outcomes("b"), 70, 1)
    bench.release("b")
    only_b_again(bench, "time limit")
    assert bench.outcomes("b") == ["interrupted", "ok"]


def test_time_limit_too_often(lab: Lab, tmp_path: Path) -> None:
    """A case that no job is long enough for is left in the end, as what it is."""
    bench = one_job(lab, tmp_path, time_limit="00:01:00", signal_delay_s=60, requeues=0)
    bench.submit(three(bench))
    status = bench.ended()
    assert (status["b"]["state"], status["b"]["failure"]) == ("lost", "time-limit")
    assert status["a"]["state"] == "done"
    assert bench.repro("collect", check=False).returncode == 1
    assert bench.latest()["b"]["outcome"] == "interrupted"


def test_cancelled(lab: Lab, tmp_path: Path) -> None:
    """By `repro cancel` while it runs, by scancel while it waits; the third goes on."""
    bench = Bench(lab, tmp_path, {"array_parallelism": 1})
    suite = three(bench)
    job = bench.submit(suite)["jobs"][0]
    bench.running_step("b")
    lab.run(["scancel", f"{job}_2"])
    bench.repro("cancel", "b")
    status = bench.ended()
    assert {name: row["state"] for name, row in status.items()} == {
        "a": "done",
        "b": "cancelled",
        "c": "cancelled",
    }
    collected = bench.repro("collect", check=False)
    assert collected.returncode == 1
    assert {name: record["outcome"] for name, record in bench.latest().items()} == {
        "a": "ok",
        "b": "interrupted",
        "c": "interrupted",
    }
    assert "cancelled" in bench.latest()["c"]["reason"]
    bench.release("b")
    assert bench.submit(suite)["cases"] == 2
    assert {row["state"] for row in bench.ended().values()} == {"done"}, bench.logs()
    assert bench.begun() == ["a", "b", "b", "c"]


def test_a_rank_is_killed(lab: Lab, tmp_path: Path) -> None:
    """Real ranks: the peers' broken connections are no cause, and the allocation goes on with the next case."""
    bench = Bench(lab, tmp_path, {"cases_per_job": 2}, real=True)
    suite = bench.suite(case("victim", "dp = 2, zero = 2", steps=3000), case("next", "dp = 2, zero = 3"))
    bench.submit(suite)
    bench.running_step("victim")
    on_n2 = [pid for pid, node in ranks() if node == "n2"]
    assert len(on_n2) == 1
    os.kill(on_n2[0], signal.SIGKILL)
    status = bench.ended()
    assert (status["victim"]["state"], status["victim"]["failure"]) == ("failed", "rank-killed"), bench.logs()
    assert "rank 1 was killed by signal 9" in status["victim"]["detail"]
    assert status["next"]["state"] == "done"
    assert (
        bench.latest()["victim"]["provenance"]["slurm"]["nodes"]
        == bench.latest()["next"]["provenance"]["slurm"]["nodes"]
    )
    assert "rank-1" in str(list(bench.results.glob("jobs/*/logs/*/*/*"))), "the logs of a failure are kept"


def test_slurmd_killed_and_a_node_set_down(lab: Lab, tmp_path: Path) -> None:
    """Both jobs start again on the nodes that are left; what had ended stays."""
    bench = Bench(lab, tmp_path, {"cases_per_job": 2})
    for name in "bd":
        bench.hold(name)
    suite = bench.suite(*(case(name, "dp = 2", seed=seed) for seed, name in enumerate("abcd")))
    bench.submit(suite)
    bench.running_step("b")
    bench.running_step("d")
    nodes = {state["current"]["names"][0]: state["nodes"] for state in bench.bundles()}
    dead, down = nodes["b"][1], nodes["d"][1]
    try:
        lab.script("kill-slurmd", dead.removeprefix("n"))
        lab.run(["scontrol", "update", f"nodename={down}", "state=down", "reason=test"])
        for name in "db":  # the node that was set down comes back by itself, so that d has nodes at once
            lab.wait_for(f"{name} starts again", lambda name=name: bench.begun().count(name) == 2, 60)
            bench.release(name)
        status = bench.ended()
    finally:
        lab.script("start-slurmd", dead.removeprefix("n"))
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert {name: bench.begun().count(name) for name in "abcd"} == {"a": 1, "b": 2, "c": 1, "d": 2}
    assert dead not in bench.latest()["b"]["provenance"]["slurm"]["nodes"]
    for name in "bd":
        assert bench.outcomes(name)[-1] == "ok"
        assert bench.outcomes(name).count("ok") == 1
        assert bench.latest()[name]["provenance"]["slurm"]["restarts"] == 1
    lab.wait_for("no rank is left, also where slurmd was killed", lambda: not ranks())


def test_link_cut_in_mid_case(tmp_path: Path) -> None:
    """The node is named, others go on, the job ends although its node does not answer, and the case runs on request."""
    with started("-cut", N="3", NODE_TIMEOUT="300") as lab:
        slurm = {"array_parallelism": 2, "requeues": 0}
        bench = Bench(lab, tmp_path, slurm, {"wide": 2}, {"SLURM_WAIT": "5"})
        bench.hold("wide")
        bench.hold("other")
        suite = bench.suite(case("wide", "dp = 2"), case("other", "micro_batch = 2"))
        bench.submit(suite)
        bench.running_step("wide")
        bench.running_step("other")
        cut = next(state["nodes"] for state in bench.bundles() if "wide" in state["current"]["names"])[1]
        lab.cut(int(cut.removeprefix("n")))
        bench.release("other")
        lab.wait_for("the loss is seen", lambda: bench.outcomes("wide"), 60)
        status = bench.status()
        assert status["wide"]["failure"] == "lost-node"
        assert cut in status["wide"]["detail"]
        assert bench.ended(["other"])["other"]["state"] == "done"
        lab.wait_for("its job runs no more", lambda: not lab.running(), 60)
        bench.release("wide")
        assert bench.submit(suite)["cases"] == 1  # on the two nodes that are left
        assert {row["state"] for row in bench.ended(["wide"]).values()} == {"done"}, bench.logs()
        assert bench.begun().count("other") == 1


def test_without_accounting(tmp_path: Path) -> None:
    """No sacct: everything works, what is less exact is said, and a job that dies is not waited for."""
    with started("-plain", N="2", DBD="0") as lab:
        bench = Bench(lab, tmp_path, {"array_parallelism": 1})
        suite = three(bench)
        bench.submit(suite)
        bench.running_step("b")
        said = bench.repro("status", check=False)
        assert "no accounting on this cluster" in said.stderr
        for pid, _ in ranks("submitit.core._submit"):
            os.kill(pid, signal.SIGKILL)
        bench.release("b")
        status = bench.ended()
        assert {name: row["state"] for name, row in status.items()} == {"a": "done", "b": "lost", "c": "done"}
        assert bench.repro("collect", check=False).returncode == 1
        assert bench.submit(suite)["cases"] == 1
        assert bench.ended()["b"]["state"] == "done"
