"""Tests of suites on the lab: results, nodes, strategies, no repeated case, no secret in a file, refused profiles."""

from __future__ import annotations

import json
import math
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.records import latest
from tests.slurm_lab.bench import Bench, case, environments
from tests.slurm_lab.cluster import Lab

pytestmark = pytest.mark.slurm

STEPS = 4
LAYOUTS = {
    "single-n1": "micro_batch = 8",
    "z0-n1": "dp = 2, micro_batch = 4",
    "z3-n1": "dp = 2, zero = 3, micro_batch = 4",
    "tp-n1": "tp = 2, micro_batch = 8",
    "z0-n2": "dp = 2, micro_batch = 2, global_batch = 8",
    "z1-n2": "dp = 2, zero = 1, micro_batch = 4",
    "tp-n2": "tp = 2, sp = true, micro_batch = 8",
    "pp-n2": "pp = 2, micro_batch = 2, global_batch = 8",
    "z2-n4": "dp = 4, zero = 2, micro_batch = 2",
    "z3-n4": "dp = 4, zero = 3, micro_batch = 2",
    "tp-dp-n4": "tp = 2, dp = 2, zero = 1, micro_batch = 4",
    "pp-dp-n4": "pp = 2, dp = 2, micro_batch = 2, global_batch = 8",
}
NODES = {name: int(name[-1]) for name in LAYOUTS}


@pytest.mark.xdist_group("cores")
def test_twelve_cases_run_once_on_their_requested_nodes(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "xyzzy-do-not-write")
    slurm = {"tasks_per_node": 2, "array_parallelism": 2}
    bench = Bench(lab, tmp_path, slurm, {"*-n2": 2, "*-n4": 4}, target="")
    # Cases with one `launch` share the start of their processes, which takes most of the time.
    shared = dict.fromkeys(LAYOUTS, "ranks") | {"tp-n2": "model", "pp-n2": "model", "single-n1": "one"}
    launches = {name: f'launch = "{shared[name]}-{NODES[name]}"' for name in LAYOUTS}
    suite = bench.suite(*(case(name, LAYOUTS[name], steps=STEPS, more=launches[name]) for name in LAYOUTS))
    before = {node: lab.counters(node) for node in (1, 2, 3, 4)}
    submitted = bench.submit(suite)
    assert submitted["cases"] == 12
    assert len(submitted["jobs"]) == 4  # one array for each shape: 1 x 1, 1 x 2, 2 x 1 and 4 x 1 tasks

    seen: dict[int, dict[str, str]] = {}

    def watch() -> bool:
        running = [job.id.split("_")[0] for job in lab.running()]
        assert all(running.count(job) <= 2 for job in running), "array_parallelism"
        seen.update({pid: found for pid, found in environments(lab) if "MASTER_ADDR" in found})
        return not lab.jobs()

    lab.wait_for("the end of all jobs", watch, 400)
    after = {node: lab.counters(node) for node in (1, 2, 3, 4)}
    newest = bench.latest()
    assert {name: newest[name]["outcome"] for name in LAYOUTS} == dict.fromkeys(LAYOUTS, "ok"), bench.logs()
    assert set(bench.states().values()) == {"done"}
    assert bench.repro("collect").returncode == 0
    assert len(bench.records()) == 12, "no case may run twice"

    # The nodes: the requested number, consecutive ranks per node, and the rendezvous on the node of rank 0.
    assert {found["SLURMD_NODENAME"] for found in seen.values()} == {"n1", "n2", "n3", "n4"}
    for found in seen.values():
        nodes = lab.run(["scontrol", "show", "hostnames", found["SLURM_JOB_NODELIST"]]).stdout.split()
        local_world = int(found["LOCAL_WORLD_SIZE"])
        assert int(found["WORLD_SIZE"]) == local_world * len(nodes)
        place = nodes.index(found["SLURMD_NODENAME"]), int(found["LOCAL_RANK"])
        assert divmod(int(found["RANK"]), local_world) == place
        assert found["MASTER_ADDR"] == lab.address(nodes[0])
        assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "eth0"
    for name, record in newest.items():
        facts = record["provenance"]["slurm"]
        nodes = facts["nodes"]
        assert len(set(nodes)) == len(nodes) == NODES[name]
        assert sorted(n for rack in facts["switches"].values() for n in rack) == sorted(nodes)
        assert set(facts["switches"]) <= {"core.rack1", "core.rack2"}
        assert (facts["partition"], facts["restarts"]) == ("debug", 0)
        assert facts["job_id"] in submitted["jobs"]

    # The bytes on the links exceed the total bytes that the ranks on several nodes recorded as sent.
    sent_bytes = sum(
        row["sent_bytes"] * STEPS
        for name, record in newest.items()
        if NODES[name] > 1
        for comm in record["comm_by_rank"]
        for row in comm
    )
    assert sent_bytes > 10_000_000
    assert sum(after[node][1] - before[node][1] for node in after) > sent_bytes
    assert all(after[node][0] > before[node][0] for node in after)

    # Losses equal the losses of the local launcher to the bit, and the losses of all strategies agree.
    local_results = tmp_path / "here"
    tables = (
        case(name, layout, steps=STEPS, more=f'launch = "{world_size(layout)}"')
        for name, layout in LAYOUTS.items()
    )
    local = bench.suite(*tables, name="local")
    command = [Path(sys.executable).parent / "repro", "run", local, "--results", local_results]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    losses = {record["name"]: record["series"]["loss"] for record in latest(local_results).values()}
    assert bench.losses() == losses
    for loss in losses.values():
        assert loss == pytest.approx(losses["single-n1"], rel=1e-4)

    # Files have no secret, are readable only by the user, and are text, except submitit's pickles.
    for path in sorted(bench.results.rglob("*")):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
        if path.is_file():
            content = path.read_bytes()
            assert b"xyzzy" not in content, path
            if path.parent.name != "submitit":
                assert path.suffix in (".json", ".jsonl", ".toml") or path.name.startswith("."), path
                content.rstrip(b"\0").decode()

    # A second submission has no case to run.
    assert bench.submit(suite)["jobs"] == []


def world_size(layout: str) -> int:
    """Return the number of ranks of a layout in text form."""
    sizes = dict(entry.split(" = ") for entry in layout.split(", "))
    return math.prod(int(sizes.get(axis, "1")) for axis in ("dp", "tp", "pp"))


def test_two_suites_run_once_despite_resubmission_and_controller_restart(lab: Lab, tmp_path: Path) -> None:
    bench = Bench(lab, tmp_path, {"array_parallelism": 1})
    compare = '[[compare]]\nbaseline = "z0"\nsubjects = ["z2"]\nrounds = 4\n'
    first = bench.suite(
        case("z0", "dp = 2", steps=9), case("z2", "dp = 2, zero = 2", steps=9), compare, name="first"
    )
    second = bench.suite(case("a", "tp = 2"), case("b", "pp = 2"), name="second")
    bench.hold("z0")
    bench.hold("a")
    jobs = [bench.submit(first), bench.submit(second)]
    assert [len(document["jobs"]) for document in jobs] == [1, 1]
    assert bench.submit(first)["jobs"] == [], "the job of this suite is pending or running"
    assert bench.submit(second, "--only", "a")["jobs"] == []
    bench.wait_for_step("z0")
    bench.wait_for_step("a")
    assert len(lab.running()) == 2
    assert len(lab.jobs()) == 3, "one element of an array may run at a time"
    expected = {"z0": "running", "z2": "running", "a": "running", "b": "pending"}
    assert bench.states() == expected
    lab.script("restart-slurmctld")
    assert bench.states() == expected
    bench.release("z0")
    bench.release("a")
    status = bench.wait_for_end()
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert {row["restarts"] for row in status.values()} == {0}
    assert sorted(bench.started_cases()) == ["a", "b", "z0", "z2"]
    experiments = [record for record in bench.records() if record["kind"] == "experiment"]
    assert sorted(record["name"] for record in experiments) == ["a", "b", "z0", "z2"]
    nodes = [bench.latest()[name]["provenance"]["slurm"]["nodes"] for name in ("z0", "z2")]
    assert nodes[0] == nodes[1], "not in one allocation"
    assert [record["name"] for record in bench.records() if record["kind"] == "comparison"] == ["z0 vs z2"]

    # No case remains, but --rerun submits a completed case.
    assert bench.submit(second)["cases"] == 0
    assert bench.submit(second, "--only", "b", "--rerun")["cases"] == 1
    assert bench.wait_for_end(["b"])["b"]["state"] == "done"
    assert bench.outcomes("b") == ["ok", "ok"]


def test_a_killed_submit_can_be_repeated(lab: Lab, tmp_path: Path) -> None:
    """`repro submit` is killed between its first and its second array."""
    bench = Bench(lab, tmp_path)
    suite = bench.suite(case("wide", "dp = 4"), case("narrow", "dp = 2"))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(
        f"#!/bin/bash\nif [ -e {tmp_path}/once ]; then sleep 60; exit 1; fi\n"
        f'touch {tmp_path}/once\nexec /usr/bin/sbatch "$@"\n'
    )
    (tools / "sbatch").chmod(0o755)
    path = f"PATH={tools}:{lab.environment['PATH']}"
    command = ["repro", "submit", str(suite), "--profile", str(bench.profile)]
    command += ["--results", str(bench.results)]
    with lab.background(["exec"], [*bench.shell(), path, *command]):

        def has_job_id() -> bool:
            written = (json.loads(file.read_text()) for file in bench.results.glob("jobs/*/submission.json"))
            return any(array["job_id"] for submission in written for array in submission["arrays"])

        lab.wait_for("the job id of the first array", has_job_id)
    # A new process reads the state of the killed one.
    states = bench.states()
    assert states["narrow"] == "not submitted"
    assert states["wide"] in ("pending", "running", "done")
    again = bench.submit(suite)
    assert again["cases"] == 1
    status = bench.wait_for_end()
    assert {row["state"] for row in status.values()} == {"done"}, bench.logs()
    assert bench.outcomes("wide") == bench.outcomes("narrow") == ["ok"]


@pytest.mark.parametrize(
    ("slurm", "layout", "expected"),
    [
        ({"partition": "gpu"}, "dp = 2", ("partition", "gpu", "debug", "high", "short")),
        ({"partition": "short", "time_limit": "00:05:00"}, "dp = 2", ("time_limit", "00:05:00", "short")),
        ({"gpus_per_node": 9}, "dp = 2", ("gpus_per_node", "9", "at most 8")),
        ({"gpus_per_node": 2, "gpu_type": "a100"}, "dp = 2", ("gpu_type", "a100", "v100")),
        ({"cpus_per_task": 200}, "dp = 2", ("cpus_per_task", "200", "at most 96")),
        (
            {},
            "dp = 8",
            ("slurm.nodes = 8: must be at most 4, the number of nodes in partition debug", "wide"),
        ),
    ],
    ids=["partition", "time limit", "GPUs", "GPU type", "cores", "nodes"],
)
def test_profile_values_beyond_the_cluster_are_refused(
    lab: Lab, tmp_path: Path, slurm: dict[str, Any], layout: str, expected: tuple[str, ...]
) -> None:
    bench = Bench(lab, tmp_path, slurm)
    line = bench.submit_error(bench.suite(case("wide", layout)))
    for word in ("profile.toml", *expected):
        assert word in line
    assert lab.jobs() == []


def test_an_error_of_sbatch_is_reported(lab: Lab, tmp_path: Path) -> None:
    """Only sbatch can detect a constraint that no node satisfies; its message is printed."""
    bench = Bench(lab, tmp_path, {"constraint": "a100&rack9"})
    done = bench.repro("submit", bench.suite(case("a", "dp = 2")), "--profile", bench.profile, check=False)
    assert done.returncode == 1
    assert "Invalid feature specification" in done.stderr
    assert bench.states() == {"a": "not submitted"}


def test_doctor_checks_the_cluster_and_a_node(lab: Lab, tmp_path: Path) -> None:
    bench = Bench(lab, tmp_path)
    done = bench.repro("doctor", "--profile", bench.profile, "--nodes", "1", "--details", check=False)
    message = done.stdout + done.stderr
    for word in ("slurm-wlm", "sacct answers", "debug: 4 nodes", "eth0"):
        assert word in message, message
