"""Tests of real job faults: the failure class is correct, no result is lost, and only interrupted cases run again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from repro.launch.failures import failure_class
from tests.launch.held_session import HELD as HELD_STEP
from tests.records import latest
from tests.slurm_lab.bench import HELD_TARGET, Bench, case, ranks
from tests.slurm_lab.cluster import ROOT, Lab, started

pytestmark = pytest.mark.slurm


def three_cases(bench: Bench) -> Path:
    """Write a suite of the cases a, b and c with two ranks each; b waits in its second step."""
    bench.hold("b")
    tables = (case(name, "dp = 2", seed=seed) for seed, name in enumerate("abc"))
    return bench.suite(*tables)


def bench_with_one_job(lab: Lab, folder: Path, **slurm: Any) -> Bench:
    """Return a bench whose cases run one after another in one allocation of two nodes."""
    return Bench(lab, folder, {"cases_per_job": 3, **slurm})


@contextmanager
def preempting_job(lab: Lab) -> Iterator[None]:
    """Run a job of the preempting partition on all nodes until the block ends."""
    submitted = lab.run(
        ["sbatch", "-p", "high", "-N4", "--exclusive", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300"]
    )
    yield
    lab.run(["scancel", submitted.stdout.strip()])


def check_only_b_restarted(bench: Bench, reason: str) -> None:
    """Check that b was interrupted once, for `reason`, and restarted from its first step; a and c ran once."""
    status = bench.wait_for_end()
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert bench.started_cases() == ["a", "b", "b", "c"]
    assert bench.outcomes("a") == bench.outcomes("c") == ["ok"]
    assert bench.outcomes("b")[-1] == "ok"
    for record in bench.records():
        if record["outcome"] == "interrupted":
            assert reason in record["reason"]
    assert bench.latest()["b"]["provenance"]["slurm"]["restarts"] == 1
    assert len(bench.latest()["b"]["series"]["loss"]) == 4, "the restarted case must run all steps"
    assert {row["restarts"] for row in status.values()} == {1}
    assert bench.repro("collect").returncode == 0


def test_preemption_restarts_only_the_running_case(lab: Lab, tmp_path: Path) -> None:
    bench = bench_with_one_job(lab, tmp_path)
    bench.submit(three_cases(bench))
    bench.wait_for_step("b")
    with preempting_job(lab):
        lab.wait_for("b is requeued", lambda: bench.states()["b"] == "requeued")
        status = bench.status()
        assert "preempted" in status["b"]["detail"]
        assert status["a"]["state"] == "done"
    bench.release("b")
    check_only_b_restarted(bench, "preempted")
    assert bench.outcomes("b") == ["interrupted", "ok"]


def test_time_limit_restarts_only_the_running_case(lab: Lab, tmp_path: Path) -> None:
    """SLURM may send its warning up to 15 s earlier than the requested 20 s before the limit."""
    bench = bench_with_one_job(lab, tmp_path, time_limit="00:01:00", signal_delay_s=20)
    bench.submit(three_cases(bench))
    bench.wait_for_step("b")
    lab.wait_for("a record of the interrupted b", lambda: bench.outcomes("b"), every=1)
    bench.release("b")
    check_only_b_restarted(bench, "time limit")
    assert bench.outcomes("b") == ["interrupted", "ok"]


def test_a_case_without_remaining_requeues_is_lost(lab: Lab, tmp_path: Path) -> None:
    """A case at the time limit has the failure class `time-limit`. A signal earlier than 20 s before the limit could
    precede the job's signal handler."""
    bench = bench_with_one_job(lab, tmp_path, time_limit="00:01:00", signal_delay_s=20, requeues=0)
    bench.submit(three_cases(bench))
    status = bench.wait_for_end()
    assert (status["b"]["state"], status["b"]["failure"]) == ("lost", "time-limit")
    assert status["a"]["state"] == "done"
    assert bench.repro("collect", check=False).returncode == 1
    assert bench.latest()["b"]["outcome"] == "interrupted"


def test_cancelled_cases_are_recorded_and_can_run_again(lab: Lab, tmp_path: Path) -> None:
    """`repro cancel` ends the running case b, scancel ends the pending case c, and the case a is not affected."""
    bench = Bench(lab, tmp_path, {"array_parallelism": 1})
    suite = three_cases(bench)
    job = bench.submit(suite)["jobs"][0]
    bench.wait_for_step("b")
    lab.run(["scancel", f"{job}_2"])
    bench.repro("cancel", "b")
    status = bench.wait_for_end()
    states = {name: row["state"] for name, row in status.items()}
    assert states == {"a": "done", "b": "cancelled", "c": "cancelled"}
    assert bench.repro("collect", check=False).returncode == 1
    outcomes = {name: record["outcome"] for name, record in bench.latest().items()}
    assert outcomes == {"a": "ok", "b": "interrupted", "c": "interrupted"}
    for record in bench.records():
        if record["name"] in "bc":  # written by the job or by `repro collect`
            assert "cancelled" in record["reason"]
            assert "time limit" not in record["reason"]
    bench.release("b")
    assert bench.submit(suite)["cases"] == 2
    assert {row["state"] for row in bench.wait_for_end().values()} == {"done"}, bench.logs()
    assert bench.started_cases() == ["a", "b", "b", "c"]


@pytest.mark.xdist_group("cores")
def test_a_killed_and_a_hanging_rank_fail_only_their_cases(lab: Lab, tmp_path: Path) -> None:
    """The failure reason names rank, step and node, and the allocation then runs its remaining cases (real ranks)."""
    bench = Bench(lab, tmp_path, {"cases_per_job": 3}, target=HELD_TARGET)
    suite = bench.suite(
        case("victim", "dp = 2, zero = 2", steps=6),
        case("stuck", "dp = 2, zero = 3", steps=6, more="limits = { hang_s = 15 }"),
        case("a", "dp = 2", steps=7),
        case("b", "dp = 2, zero = 1", steps=7),
        '[[compare]]\nbaseline = "a"\nsubjects = ["b"]\nrounds = 3\n',
    )
    bench.hold("victim.rank-1")
    bench.hold("stuck.rank-1")
    bench.submit(suite)
    bench.wait_for_step("victim", HELD_STEP)
    (state,) = bench.bundles()
    pids_on_second_node = [pid for pid, node in ranks(lab) if node == state["nodes"][1]]
    assert len(pids_on_second_node) == 1
    os.kill(pids_on_second_node[0], signal.SIGKILL)
    status = bench.wait_for_end()
    failed = {name: (row["state"], row["failure"]) for name, row in status.items() if row["failure"]}
    assert failed == {"victim": ("failed", "rank-killed"), "stuck": ("failed", "hang")}, bench.logs()
    # The peer's broken connection must not be reported as the cause.
    assert status["victim"]["detail"].startswith("rank 1 was killed by signal 9 (SIGKILL) at step 3")
    # The report has the position, the last collective and the stack of each rank.
    assert "no progress for 15 s (limits.hang_s): rank 1 is behind at step 3" in status["stuck"]["detail"]
    assert "; rank 0 waits at step 3, forward, after collective all_gather #" in status["stuck"]["detail"]
    (positions,) = bench.results.glob("jobs/*/logs/*/*/positions.txt")
    nodes = state["nodes"]
    lines = positions.read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == [f"rank 0 on {nodes[0]}", f"rank 1 on {nodes[1]}"]
    for rank, frame in ((0, "repro/parallel/transports.py"), (1, "in phase\n")):
        message = bench.repro("logs", "stuck", "--rank", str(rank)).stdout
        assert "most recent call first" in message
        assert frame in message
    # Compared cases alternate (their first step, then three rounds) on the nodes of the failed cases.
    assert bench.started_cases() == ["victim", "stuck", *("a", "b") * 4]
    latest = bench.latest()
    assert {tuple(latest[name]["provenance"]["slurm"]["nodes"]) for name in latest} == {tuple(nodes)}
    (compared,) = (record for record in bench.records() if record["kind"] == "comparison")
    assert compared["name"] == "a vs b"


@pytest.mark.xdist_group("cores")
def test_out_of_memory_is_a_result_and_a_timeout_a_failure(lab: Lab, tmp_path: Path) -> None:
    """An expected out-of-memory error is a result. A case ends after `limits.timeout_s` as a failure (real ranks)."""
    bench = Bench(lab, tmp_path, {"array_parallelism": 1}, target=HELD_TARGET)
    short, long = "limits = { timeout_s = 40 }", "limits = { timeout_s = 600 }"
    big = 'model = "limit-40m"\ntraining = { steps = 2, untimed_steps = 1, seq = 32 }'
    big += '\nexpect = "oom"\nlimits = { memory_bytes = 300_000_000 }\n'
    big = f'[[experiment]]\nname = "big"\nlayout = {{ dp = 2 }}\n{big}'
    suite = bench.suite(big, case("slow", "dp = 2", more=short))
    bench.hold("slow")
    bench.submit(suite)
    status = bench.wait_for_end()
    found = {name: (row["state"], row["failure"]) for name, row in status.items()}
    assert found == {"big": ("done", "out-of-memory"), "slow": ("failed", "time-out")}, bench.logs()
    assert "can't allocate memory" in bench.latest()["big"]["reason"]
    assert "the experiment did not end within 40 s (limits.timeout_s)" in status["slow"]["detail"]
    assert f"(ranks 0, 1 at step {HELD_STEP}, input, after collective all_reduce" in status["slow"]["detail"]
    bench.release("slow")
    suite = bench.suite(big, case("slow", "dp = 2", more=long))
    assert bench.submit(suite)["cases"] == 1, "only the case without a result must be submitted"
    assert bench.wait_for_end()["slow"]["state"] == "done", bench.logs()


def test_a_preempted_training_resumes_from_its_checkpoint(lab: Lab, tmp_path: Path) -> None:
    """The losses of a preempted twin of the quality suite equal the losses of an uninterrupted run to the bit."""
    name, quality = "twin-whole-zero3-dp2", ROOT / "suites" / "quality.toml"
    bench = Bench(lab, tmp_path, target=HELD_TARGET)
    bench.hold(name)
    bench.submit(quality, "--only", name)
    bench.wait_for_step(name, HELD_STEP)
    with preempting_job(lab):
        lab.wait_for("the case is requeued", lambda: bench.states()[name] == "requeued")
    bench.release(name)
    status = bench.wait_for_end()
    assert status[name]["state"] == "done", bench.logs()
    interrupted, done = bench.records()
    assert "preempted" in interrupted["reason"]
    assert interrupted["reason"].endswith("after step 4; the next run resumes from this step")
    assert done["series"]["resumed_from"] == [HELD_STEP + 1]
    local_results = tmp_path / "here"
    lab.run(["repro", "run", quality, "--only", name, "--results", local_results])
    (full,) = latest(local_results).values()
    assert "resumed_from" not in full["series"]
    assert done["series"]["loss"] == full["series"]["loss"]
    assert len(full["series"]["loss"]) == 40


def test_nodes_with_wrong_hardware_start_no_rank(lab: Lab, tmp_path: Path) -> None:
    """The scheduler declares GPUs that the nodes do not have: no rank starts, and the cases fail."""
    bench = Bench(lab, tmp_path, {"gpus_per_node": 2, "gpu_type": "v100"}, system="dgx1-v100-32gb")
    suite = bench.suite(
        *(case(name, "dp = 2", more='system = "dgx1-v100-32gb"', seed=seed) for seed, name in enumerate("ab"))
    )
    bench.submit(suite)
    status = bench.wait_for_end()
    assert {(row["state"], row["failure"]) for row in status.values()} == {("failed", "wrong-hardware")}
    assert bench.started_cases() == []
    for row in status.values():
        message = (
            f"wrong hardware: node {row['nodes']} has no GPU, but system dgx1-v100-32gb has 2 x NVIDIA V100"
        )
        assert row["detail"].startswith(message)
        assert row["detail"].endswith("results would not be those of dgx1-v100-32gb")
    collected = bench.repro("collect", check=False)
    assert "repro submit --exclude" in collected.stdout


def test_jobs_of_failed_nodes_restart_on_other_nodes(lab: Lab, tmp_path: Path) -> None:
    """A killed slurmd and a node in state `down` restart both jobs; completed cases do not run again."""
    bench = Bench(lab, tmp_path, {"cases_per_job": 2})
    for name in "bd":
        bench.hold(name)
    suite = bench.suite(*(case(name, "dp = 2", seed=seed) for seed, name in enumerate("abcd")))
    bench.submit(suite)
    bench.wait_for_step("b")
    bench.wait_for_step("d")
    nodes = {state["current"]["names"][0]: state["nodes"] for state in bench.bundles()}
    dead, down = nodes["b"][1], nodes["d"][1]
    try:
        lab.script("kill-slurmd", dead.removeprefix("n"))
        lab.run(["scontrol", "update", f"nodename={down}", "state=down", "reason=test"])
        for name in "db":  # the node in state `down` returns automatically, so that d restarts first
            lab.wait_for(f"{name} starts again", lambda name=name: bench.started_cases().count(name) == 2)
            bench.release(name)
        status = bench.wait_for_end()
    finally:
        lab.script("start-slurmd", dead.removeprefix("n"))
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert {name: bench.started_cases().count(name) for name in "abcd"} == {"a": 1, "b": 2, "c": 1, "d": 2}
    assert dead not in bench.latest()["b"]["provenance"]["slurm"]["nodes"]
    for record in bench.records():
        if record["outcome"] != "ok":  # SLURM may kill a job before it writes this record
            failure = failure_class(record["outcome"], record["reason"])
            assert failure in ("node-failure", "lost-node"), record["reason"]
    for name in "bd":
        assert bench.outcomes(name)[-1] == "ok"
        assert bench.outcomes(name).count("ok") == 1
        assert bench.latest()[name]["provenance"]["slurm"]["restarts"] == 1
    lab.wait_for("the end of all ranks, also on the node without slurmd", lambda: not ranks(lab))


def test_a_cut_link_fails_only_the_cases_of_its_node(tmp_path: Path) -> None:
    """The report names the node, its job ends although the node does not answer, and the case can run again."""
    with started("-cut", N="3", NODE_TIMEOUT="300") as lab:
        slurm = {"array_parallelism": 2, "requeues": 0}
        bench = Bench(lab, tmp_path, slurm, {"wide": 2})
        bench.hold("wide")
        bench.hold("other")
        suite = bench.suite(case("wide", "dp = 2"), case("other", "micro_batch = 2"))
        bench.submit(suite)
        bench.wait_for_step("wide")
        bench.wait_for_step("other")
        cut = next(state["nodes"] for state in bench.bundles() if "wide" in state["current"]["names"])[1]
        lab.cut(int(cut.removeprefix("n")))
        bench.release("other")
        lab.wait_for("a record of the failed case", lambda: bench.outcomes("wide"))
        status = bench.status()
        assert status["wide"]["failure"] == "lost-node"
        assert cut in status["wide"]["detail"]
        assert bench.wait_for_end(["other"])["other"]["state"] == "done"
        lab.wait_for("the end of all jobs", lambda: not lab.running())
        collected = bench.repro("collect", check=False)
        assert f"1 failure because of node {cut}; use `repro submit --exclude {cut}`." in collected.stdout
        lab.join(int(cut.removeprefix("n")))  # without --exclude, SLURM would use this node
        lab.wait_for("idle nodes", lambda: lab.nodes() == {"idle"})
        bench.release("wide")
        assert bench.submit(suite, "--exclude", cut)["cases"] == 1
        assert {row["state"] for row in bench.wait_for_end(["wide"]).values()} == {"done"}, bench.logs()
        assert cut not in bench.latest()["wide"]["provenance"]["slurm"]["nodes"]
        assert bench.started_cases().count("other") == 1


def test_launches_wait_for_an_unavailable_slurmctld(lab: Lab, tmp_path: Path) -> None:
    """Without slurmctld, the running case completes, and the next case waits for slurmctld."""
    bench = Bench(lab, tmp_path, {"cases_per_job": 2})
    bench.hold("a")
    bench.submit(bench.suite(*(case(name, "dp = 2", seed=seed) for seed, name in enumerate("ab"))))
    bench.wait_for_step("a")
    os.kill(int((lab.folder / "slurmctld.pid").read_text()), signal.SIGTERM)  # SIGTERM saves the state
    bench.release("a")
    lab.wait_for("the end of a", lambda: bench.outcomes("a"))
    steps: set[int] = set()

    def is_restarted() -> bool:
        steps.update(pid for pid, _ in ranks(lab, "--distribution=plane"))
        return len(steps) > 1

    lab.wait_for("a second start of srun", is_restarted)
    lab.script("restart-slurmctld")
    status = bench.wait_for_end()
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert bench.started_cases() == ["a", "b"]
    assert bench.outcomes("b") == ["ok"]


def test_a_cluster_without_accounting_reports_lost_jobs(tmp_path: Path) -> None:
    """Without sacct, all commands work, `repro status` prints a warning, and a killed job is reported as lost."""
    with started("-plain", N="2", DBD="0") as lab:
        bench = Bench(lab, tmp_path, {"array_parallelism": 1})
        suite = three_cases(bench)
        bench.submit(suite)
        bench.wait_for_step("b")
        message = bench.repro("status", check=False)
        assert "no accounting on this cluster" in message.stderr
        for pid, _ in ranks(lab, "submitit.core._submit"):
            with suppress(ProcessLookupError):  # the job's script may end first
                os.kill(pid, signal.SIGKILL)
        bench.release("b")
        status = bench.wait_for_end()
        assert {name: row["state"] for name, row in status.items()} == {"a": "done", "b": "lost", "c": "done"}
        assert bench.repro("collect", check=False).returncode == 1
        assert bench.submit(suite)["cases"] == 1
        assert bench.wait_for_end()["b"]["state"] == "done"
