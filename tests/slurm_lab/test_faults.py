"""What clusters do to jobs, provoked for real: the right class, nothing lost, only what was interrupted runs again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from repro.launch.failures import failure_class
from tests.launch.held_session import HELD as STEP
from tests.records import latest
from tests.slurm_lab.bench import HELD, Bench, case, ranks
from tests.slurm_lab.cluster import ROOT, Lab, started

pytestmark = pytest.mark.slurm


def three(bench: Bench) -> Path:
    """A suite of cases a, b, c of two ranks each; b stays in its second step."""
    bench.hold("b")
    tables = (case(name, "dp = 2", seed=seed) for seed, name in enumerate("abc"))
    return bench.suite(*tables)


def one_job(lab: Lab, folder: Path, **slurm: Any) -> Bench:
    """A bench whose cases follow each other in one allocation of two nodes."""
    return Bench(lab, folder, {"cases_per_job": 3, **slurm})


@contextmanager
def all_nodes_for_others(lab: Lab) -> Iterator[None]:
    """A job of the partition that preempts takes all nodes, and has them until the block ends."""
    submitted = lab.run(
        ["sbatch", "-p", "high", "-N4", "--exclusive", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300"]
    )
    yield
    lab.run(["scancel", submitted.stdout.strip()])


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
    assert len(bench.latest()["b"]["series"]["loss"]) == 4, "all steps ran, not only the remaining ones"
    assert {row["restarts"] for row in status.values()} == {1}
    assert bench.repro("collect").returncode == 0


def test_preempted_in_mid_suite(lab: Lab, tmp_path: Path) -> None:
    bench = one_job(lab, tmp_path)
    bench.submit(three(bench))
    bench.running_step("b")
    with all_nodes_for_others(lab):
        lab.wait_for("b has made way", lambda: bench.states()["b"] == "requeued")
        status = bench.status()
        assert "preempted" in status["b"]["detail"]
        assert status["a"]["state"] == "done"
    bench.release("b")
    only_b_again(bench, "preempted")
    assert bench.outcomes("b") == ["interrupted", "ok"]


def test_time_limit_in_mid_suite(lab: Lab, tmp_path: Path) -> None:
    """SLURM's warning comes up to 15 s before the 20 s that were asked for."""
    bench = one_job(lab, tmp_path, time_limit="00:01:00", signal_delay_s=20)
    bench.submit(three(bench))
    bench.running_step("b")
    lab.wait_for("the warning", lambda: bench.outcomes("b"), every=1)
    bench.release("b")
    only_b_again(bench, "time limit")
    assert bench.outcomes("b") == ["interrupted", "ok"]


def test_time_limit_too_often(lab: Lab, tmp_path: Path) -> None:
    """A case that no job is long enough for is left in the end, as what it is.  Warned of earlier, a job may not have
    begun to listen."""
    bench = one_job(lab, tmp_path, time_limit="00:01:00", signal_delay_s=20, requeues=0)
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
    for record in bench.records():
        if record["name"] in "bc":  # by its job when it was asked to end, or by collect
            assert "cancelled" in record["reason"]
            assert "time limit" not in record["reason"]
    bench.release("b")
    assert bench.submit(suite)["cases"] == 2
    assert {row["state"] for row in bench.ended().values()} == {"done"}, bench.logs()
    assert bench.begun() == ["a", "b", "b", "c"]


@pytest.mark.xdist_group("cores")
def test_ranks_are_killed_and_hang(lab: Lab, tmp_path: Path) -> None:
    """Real ranks: each fault costs one case and says who and where, and the allocation goes on with a comparison."""
    bench = Bench(lab, tmp_path, {"cases_per_job": 3}, target=HELD)
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
    bench.running_step("victim", STEP)
    (state,) = bench.bundles()
    on_second = [pid for pid, node in ranks(lab) if node == state["nodes"][1]]
    assert len(on_second) == 1
    os.kill(on_second[0], signal.SIGKILL)
    status = bench.ended()
    failed = {name: (row["state"], row["failure"]) for name, row in status.items() if row["failure"]}
    assert failed == {"victim": ("failed", "rank-killed"), "stuck": ("failed", "hang")}, bench.logs()
    # The peer's broken connection is no cause.
    assert status["victim"]["detail"].startswith("rank 1 was killed by signal 9 (SIGKILL) at step 3")
    # Where each rank is, its last collective, and its stacks.
    assert "no progress for 15 s (limits.hang_s): rank 1 is behind at step 3" in status["stuck"]["detail"]
    assert "; rank 0 waits at step 3, forward, after all_gather #" in status["stuck"]["detail"]
    (positions,) = bench.results.glob("jobs/*/logs/*/*/positions.txt")
    nodes = state["nodes"]
    lines = positions.read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == [f"rank 0 on {nodes[0]}", f"rank 1 on {nodes[1]}"]
    for rank, where in ((0, "repro/parallel/transports.py"), (1, "in phase\n")):
        message = bench.repro("logs", "stuck", "--rank", str(rank)).stdout
        assert "most recent call first" in message
        assert where in message
    # Compared cases take turns (their first step, then three rounds), on the nodes where the others failed.
    assert bench.begun() == ["victim", "stuck", *("a", "b") * 4]
    latest = bench.latest()
    assert {tuple(latest[name]["provenance"]["slurm"]["nodes"]) for name in latest} == {tuple(nodes)}
    (compared,) = (record for record in bench.records() if record["kind"] == "comparison")
    assert compared["name"] == "a vs b"


@pytest.mark.xdist_group("cores")
def test_out_of_memory_and_time(lab: Lab, tmp_path: Path) -> None:
    """Real ranks: what does not fit has its result, and what takes longer than it may is ended, wherever it waits."""
    bench = Bench(lab, tmp_path, {"array_parallelism": 1}, target=HELD)
    short, long = "limits = { timeout_s = 40 }", "limits = { timeout_s = 600 }"
    big = 'model = "limit-40m"\ntraining = { steps = 2, untimed_steps = 1, seq = 32 }'
    big += '\nexpect = "oom"\nlimits = { memory_bytes = 300_000_000 }\n'
    big = f'[[experiment]]\nname = "big"\nlayout = {{ dp = 2 }}\n{big}'
    suite = bench.suite(big, case("slow", "dp = 2", more=short))
    bench.hold("slow")
    bench.submit(suite)
    status = bench.ended()
    found = {name: (row["state"], row["failure"]) for name, row in status.items()}
    assert found == {"big": ("done", "out-of-memory"), "slow": ("failed", "time-out")}, bench.logs()
    assert "can't allocate memory" in bench.latest()["big"]["reason"]
    assert "not done after 40 s (limits.timeout_s)" in status["slow"]["detail"]
    assert f"(ranks 0, 1 at step {STEP}, input, after all_reduce" in status["slow"]["detail"]
    bench.release("slow")
    suite = bench.suite(big, case("slow", "dp = 2", more=long))
    assert bench.submit(suite)["cases"] == 1, "only what has no result"
    assert bench.ended()["slow"]["state"] == "done", bench.logs()


def test_a_long_training_is_preempted_and_goes_on(lab: Lab, tmp_path: Path) -> None:
    """A twin of the quality suite reads in its second start the checkpoint of its first: equal losses, to the bit."""
    name, quality = "twin-whole-zero3-dp2", ROOT / "suites" / "quality.toml"
    bench = Bench(lab, tmp_path, target=HELD)
    bench.hold(name)
    bench.submit(quality, "--only", name)
    bench.running_step(name, STEP)
    with all_nodes_for_others(lab):
        lab.wait_for("it has made way", lambda: bench.states()[name] == "requeued")
    bench.release(name)
    status = bench.ended()
    assert status[name]["state"] == "done", bench.logs()
    interrupted, done = bench.records()
    assert "preempted" in interrupted["reason"]
    assert interrupted["reason"].endswith("after step 4; the next run resumes there")
    assert done["series"]["resumed_from"] == [STEP + 1]
    here = tmp_path / "here"
    lab.run(["repro", "run", quality, "--only", name, "--results", here])
    (full,) = latest(here).values()
    assert "resumed_from" not in full["series"]
    assert done["series"]["loss"] == full["series"]["loss"]
    assert len(full["series"]["loss"]) == 40


def test_wrong_hardware(lab: Lab, tmp_path: Path) -> None:
    """The scheduler's GPUs are none: the nodes say so, nothing is started, and the record is no result."""
    bench = Bench(lab, tmp_path, {"gpus_per_node": 2, "gpu_type": "v100"}, system="dgx1-v100-32gb")
    suite = bench.suite(
        *(case(name, "dp = 2", more='system = "dgx1-v100-32gb"', seed=seed) for seed, name in enumerate("ab"))
    )
    bench.submit(suite)
    status = bench.ended()
    assert {(row["state"], row["failure"]) for row in status.values()} == {("failed", "wrong-hardware")}
    assert bench.begun() == []
    for row in status.values():
        message = f"wrong hardware: node {row['nodes']} has no GPU, but dgx1-v100-32gb has 2 x NVIDIA V100"
        assert row["detail"].startswith(message)
        assert row["detail"].endswith("not comparable")
    collected = bench.repro("collect", check=False)
    assert "repro submit --exclude" in collected.stdout


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
            lab.wait_for(f"{name} starts again", lambda name=name: bench.begun().count(name) == 2)
            bench.release(name)
        status = bench.ended()
    finally:
        lab.script("start-slurmd", dead.removeprefix("n"))
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert {name: bench.begun().count(name) for name in "abcd"} == {"a": 1, "b": 2, "c": 1, "d": 2}
    assert dead not in bench.latest()["b"]["provenance"]["slurm"]["nodes"]
    for record in bench.records():
        if record["outcome"] != "ok":  # if SLURM left it the time to write
            assert failure_class(record["outcome"], record["reason"]) in ("node-failure", "lost-node"), (
                record["reason"]
            )
    for name in "bd":
        assert bench.outcomes(name)[-1] == "ok"
        assert bench.outcomes(name).count("ok") == 1
        assert bench.latest()[name]["provenance"]["slurm"]["restarts"] == 1
    lab.wait_for("no rank is left, also where slurmd was killed", lambda: not ranks(lab))


def test_link_cut_in_mid_case(tmp_path: Path) -> None:
    """The node is named, others go on, the job ends although its node does not answer, and the case runs on request."""
    with started("-cut", N="3", NODE_TIMEOUT="300") as lab:
        slurm = {"array_parallelism": 2, "requeues": 0}
        bench = Bench(lab, tmp_path, slurm, {"wide": 2})
        bench.hold("wide")
        bench.hold("other")
        suite = bench.suite(case("wide", "dp = 2"), case("other", "micro_batch = 2"))
        bench.submit(suite)
        bench.running_step("wide")
        bench.running_step("other")
        cut = next(state["nodes"] for state in bench.bundles() if "wide" in state["current"]["names"])[1]
        lab.cut(int(cut.removeprefix("n")))
        bench.release("other")
        lab.wait_for("the loss is seen", lambda: bench.outcomes("wide"))
        status = bench.status()
        assert status["wide"]["failure"] == "lost-node"
        assert cut in status["wide"]["detail"]
        assert bench.ended(["other"])["other"]["state"] == "done"
        lab.wait_for("its job runs no more", lambda: not lab.running())
        collected = bench.repro("collect", check=False)
        assert f"1 failure on node {cut}; use `repro submit --exclude {cut}`." in collected.stdout
        lab.join(int(cut.removeprefix("n")))  # so that SLURM would use it
        lab.wait_for("all nodes are idle", lambda: lab.nodes() == {"idle"})
        bench.release("wide")
        assert bench.submit(suite, "--exclude", cut)["cases"] == 1
        assert {row["state"] for row in bench.ended(["wide"]).values()} == {"done"}, bench.logs()
        assert cut not in bench.latest()["wide"]["provenance"]["slurm"]["nodes"]
        assert bench.begun().count("other") == 1


def test_slurmctld_is_away_when_a_launch_is_to_start(lab: Lab, tmp_path: Path) -> None:
    """What runs goes on without it, and what comes next waits for it."""
    bench = Bench(lab, tmp_path, {"cases_per_job": 2})
    bench.hold("a")
    bench.submit(bench.suite(*(case(name, "dp = 2", seed=seed) for seed, name in enumerate("ab"))))
    bench.running_step("a")
    os.kill(int((lab.folder / "slurmctld.pid").read_text()), signal.SIGTERM)  # it saves what it knows
    bench.release("a")
    lab.wait_for("the end of a", lambda: bench.outcomes("a"))
    steps: set[int] = set()

    def again() -> bool:
        steps.update(pid for pid, _ in ranks(lab, "--distribution=plane"))
        return len(steps) > 1

    lab.wait_for("srun has given up and is started again", again)
    lab.script("restart-slurmctld")
    status = bench.ended()
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert bench.begun() == ["a", "b"]
    assert bench.outcomes("b") == ["ok"]


def test_without_accounting(tmp_path: Path) -> None:
    """No sacct: everything works, what is less exact is said, and a job that dies is not waited for."""
    with started("-plain", N="2", DBD="0") as lab:
        bench = Bench(lab, tmp_path, {"array_parallelism": 1})
        suite = three(bench)
        bench.submit(suite)
        bench.running_step("b")
        message = bench.repro("status", check=False)
        assert "no accounting on this cluster" in message.stderr
        for pid, _ in ranks(lab, "submitit.core._submit"):
            with suppress(ProcessLookupError):  # its script ends when the job in it does
                os.kill(pid, signal.SIGKILL)
        bench.release("b")
        status = bench.ended()
        assert {name: row["state"] for name, row in status.items()} == {"a": "done", "b": "lost", "c": "done"}
        assert bench.repro("collect", check=False).returncode == 1
        assert bench.submit(suite)["cases"] == 1
        assert bench.ended()["b"]["state"] == "done"
