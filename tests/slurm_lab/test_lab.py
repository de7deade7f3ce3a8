"""slurm/lab keeps its promises: a real cluster, links, GPUs, partitions, no trace afterwards, no harm to others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import submitit
from submitit.slurm.slurm import SlurmJob

from tests.slurm_lab.cluster import SCRIPT, Lab, started

pytestmark = pytest.mark.slurm

RECEIVE = """
import socket
server = socket.create_server(("", 7000))
print("ready", flush=True)
connection, _ = server.accept()
count = 0
while data := connection.recv(1 << 20):
    count += len(data)
print(count, flush=True)
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
began = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - began)
"""


def traces(lab: Lab) -> list[str]:
    """Namespaces, files, mounts and living processes of a lab."""
    found = [
        str(path) for parent in ("/run/netns", "/etc/netns") for path in Path(parent).glob(f"{lab.prefix}-*")
    ]
    found += [str(lab.folder)] if lab.folder.exists() else []
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if lab.prefix in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if str(lab.folder / "etc").encode() in environment:
            found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def hosts(lab: Lab, *options: str) -> list[str]:
    return sorted(lab.run(["srun", *options, "hostname"]).stdout.split())


def test_twice_in_a_row_and_no_trace() -> None:
    for accounting in ("1", "0"):
        with started("-twice", N="2", DBD=accounting) as lab:
            assert hosts(lab, "-N2") == ["n1", "n2"]
            assert len(traces(lab)) > 6
            again = lab.script("up", check=False)
            assert again.returncode == 1
            assert "already up" in again.stderr
            lab.run(["sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 100"])
            lab.wait_for("the job runs", lab.running)
        assert traces(lab) == []
    assert "no lab in" in lab.script("down").stdout


def test_what_a_killed_lab_left_is_cleaned() -> None:
    with started("-killed", N="1", DBD="0") as lab:
        controller = int((lab.folder / "slurmctld.pid").read_text())
        os.kill(controller, signal.SIGKILL)
        lab.wait_for("it is dead", lambda: not Path(f"/proc/{controller}/exe").exists())
        assert "does not run" in lab.script("status", check=False).stderr
        assert "ended badly" in lab.script("up").stdout
        assert hosts(lab) == ["n1"]
    assert traces(lab) == []


def test_two_labs_side_by_side(lab: Lab) -> None:
    with started("-beside", N="2", DBD="0") as other:
        assert hosts(other, "-N2") == ["n1", "n2"]
        assert hosts(lab, "-N4") == ["n1", "n2", "n3", "n4"]
    assert hosts(lab, "-N4") == ["n1", "n2", "n3", "n4"]


def test_without_namespaces() -> None:
    with started("-plain", N="2", DBD="0", NETNS="0", PORT="27800") as lab:
        assert len(hosts(lab, "-N2")) == 2
        refused = lab.script("rate", "1gbit", check=False)
        assert refused.returncode == 1
        assert "NETNS=1" in refused.stderr
    assert traces(lab) == []


def test_removes_only_its_own(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    foreign = Lab(tmp_path, "foreign")
    for command in ("up", "down"):
        refused = foreign.script(command, check=False)
        assert refused.returncode == 1
        assert "no lab" in refused.stderr
    assert (tmp_path / "letter").read_text() == "dear"
    taken = Lab(Path(f"{lab.folder}-b"), lab.prefix).script("up", check=False)
    assert f"LAB={lab.folder} slurm/lab down" in taken.stderr
    assert not Path(f"{lab.folder}-b").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"N": "0"}, "N=0: 1 to 200"), ({"N": "x"}, "a whole number"), ({"GPUS": "99"}, "at most 64")],
)
def test_refuses_in_one_line(settings: dict[str, str], says: str, tmp_path: Path) -> None:
    refused = Lab(tmp_path / "none", "none", settings).script("up", check=False)
    assert refused.returncode == 1
    assert says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "none").exists()


def test_says_which_packages_are_missing(tmp_path: Path) -> None:
    script = tmp_path / "lab"  # with a PATH that has only what a machine without SLURM has
    script.write_text(SCRIPT.read_text().replace("PATH=$PATH:/usr/sbin:/sbin", f"PATH={tmp_path}"))
    for name in ("bash", "id", "realpath", "dirname", "cat", "seq", "sed", "grep", "ls"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    environment = os.environ | {"LAB": str(tmp_path / "none")}
    done = subprocess.run(["/bin/bash", str(script), "up"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"slurm/lab: not installed: slurmctld .*apt-get install slurm-wlm .*\n", done.stderr)


@pytest.mark.xdist_group("cores")
def test_links_are_limited_and_counted(lab: Lab) -> None:
    size = 4_000_000

    def transfer() -> float:
        with lab.background(["node", "2"], ["python3", "-c", RECEIVE]) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            seconds = float(lab.node(1, ["python3", "-c", SEND, "n2", str(size)]))
            assert receiver.stdout.readline() == f"{size}\n"
        return seconds

    before = lab.counters(1), lab.counters(2)
    transfer()
    after = lab.counters(1), lab.counters(2)
    assert size < after[0][1] - before[0][1] < 1.2 * size
    assert size < after[1][0] - before[1][0] < 1.2 * size
    lab.rate("20mbit", 1, 2)
    try:
        # Two buckets of 128 kB pass at once; the rest cannot be faster than the rate.
        assert transfer() > (size - 2 * 131072) * 8 / 20e6
    finally:
        lab.rate("none")
    assert "tbf" not in lab.node(1, ["tc", "qdisc"])


def test_cut_and_joined(lab: Lab) -> None:
    reach = ["python3", "-c", "import socket; socket.create_connection(('n2', 1), timeout=2)"]
    refused = "ConnectionRefusedError"
    assert refused in lab.script("node", "1", *reach, check=False).stderr
    lab.cut(2)
    assert refused not in lab.script("node", "1", *reach, check=False).stderr
    lab.join(2)
    lab.wait_for("n2 is there again", lambda: refused in lab.script("node", "1", *reach, check=False).stderr)


def test_gpus_features_limits(lab: Lab, tmp_path: Path) -> None:
    show, seen = "echo $CUDA_VISIBLE_DEVICES", tmp_path / "seen"
    keep = f"{show}; until [ -e {seen} ]; do sleep 0.1; done"
    one = ["srun", "-w", "n1", "--mem=1G"]
    with lab.background(["exec"], [*one, "--gres=gpu:v100:3", "bash", "-c", keep]) as first:
        assert first.stdout is not None
        taken = first.stdout.readline().strip().split(",")
        rest = lab.run([*one, "--gres=gpu:5", "bash", "-c", show]).stdout.strip().split(",")
        seen.touch()
        assert first.wait() == 0
    assert len(taken) == 3
    assert sorted(taken + rest) == [str(i) for i in range(8)]
    assert lab.run(["srun", "--gres=gpu:9", "true"], check=False).returncode != 0
    assert set(hosts(lab, "--constraint=rack2", "-N2")) == {"n3", "n4"}
    assert "2:00" in lab.run(["sinfo", "-h", "-p", "short", "-o", "%l"]).stdout


def test_high_preempts_debug(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "low.sh"
    script.write_text(
        f"#!/bin/bash\ntrap 'echo told >> {tmp_path}/told; scontrol requeue $SLURM_JOB_ID; exit' USR2\n"
        f"echo start >> {tmp_path}/starts\nsleep 100 &\nwait\n"
    )
    low = [
        "sbatch",
        "--parsable",
        "-N4",
        "--exclusive",
        "--requeue",
        "--signal=B:USR2@30",
        "-t",
        "60",
        "-o",
        "/dev/null",
    ]
    job = lab.run([*low, script]).stdout.strip()
    lab.wait_for("the low job has started", (tmp_path / "starts").exists)
    assert hosts(lab, "-p", "high", "-N4", "--exclusive") == ["n1", "n2", "n3", "n4"]
    assert (tmp_path / "told").read_text() == "told\n"
    assert lab.show("job", job)["Restarts"] == "1"
    lab.wait_for("it starts again", lambda: (tmp_path / "starts").read_text() == "start\nstart\n")


def test_commands_of_nodes(lab: Lab) -> None:
    lab.script("kill-slurmd", "4")
    assert "no slurmd" in lab.script("kill-slurmd", "4", check=False).stderr
    lab.script("start-slurmd", "4")
    lab.script("restart-slurmctld")
    lab.wait_for("n4 answers", lambda: "n4" in hosts(lab, "-w", "n4"))


def test_a_submitit_array_over_two_nodes(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that submits for us, unmodified, with real ranks on real hosts."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(SlurmJob.watcher, "_delay_s", 2)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol"):
        (tmp_path / "bin" / name).write_text(
            f'#!/bin/bash\nLAB={lab.folder} exec {SCRIPT} exec /usr/bin/{name} "$@"\n'
        )
        (tmp_path / "bin" / name).chmod(0o755)
    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="slurm")
    executor.update_parameters(
        nodes=2, tasks_per_node=2, timeout_min=60, slurm_array_parallelism=1, cpus_per_task=1
    )
    jobs = executor.map_array(describe, [1, 2])
    written = [tmp_path / "jobs" / f"{job.job_id}_3_result.pkl" for job in jobs]
    lab.wait_for("all results", lambda: all(path.exists() for path in written))
    for given, job in zip((1, 2), jobs, strict=True):
        # The second job gets other nodes while those of the first are completing.
        results = job.results()
        first, second = sorted({node for _, _, node in results})
        assert results == [(given, rank, node) for rank, node in enumerate([first, first, second, second])]


def describe(given: int) -> tuple[int, int, str]:
    environment = submitit.JobEnvironment()
    return given, environment.global_rank, environment.hostname
