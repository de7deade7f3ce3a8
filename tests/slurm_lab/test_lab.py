"""Tests of slurm/lab: a real cluster with links and GPUs, complete removal, and isolation of labs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

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


def remains(lab: Lab) -> list[str]:
    """Return the network namespaces, folders, mounts and processes of a lab."""
    found = [
        str(path) for parent in ("/run/netns", "/etc/netns") for path in Path(parent).glob(f"{lab.prefix}-*")
    ]
    found += [str(lab.folder)] if lab.folder.exists() else []
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if lab.prefix in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:  # the process has ended
            continue
        if str(lab.folder / "etc").encode() in environment:
            found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def hosts(lab: Lab, *options: str) -> list[str]:
    return sorted(lab.run(["srun", *options, "hostname"]).stdout.split())


def test_shutdown_removes_all_traces_of_a_lab() -> None:
    for accounting in ("1", "0"):
        with started("-twice", N="2", DBD=accounting) as lab:
            assert hosts(lab, "-N2") == ["n1", "n2"]
            assert len(remains(lab)) > 6
            again = lab.script("up", check=False)
            assert again.returncode == 1
            assert "already up" in again.stderr
            lab.run(["sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 100"])
            lab.wait_for("a running job", lab.running)
        assert remains(lab) == []
    assert "no lab in" in lab.script("down").stdout


def test_start_removes_the_remains_of_a_killed_lab() -> None:
    with started("-killed", N="1", DBD="0") as lab:
        controller = int((lab.folder / "slurmctld.pid").read_text())
        os.kill(controller, signal.SIGKILL)
        lab.wait_for("the end of slurmctld", lambda: not Path(f"/proc/{controller}/exe").exists())
        assert "does not run" in lab.script("status", check=False).stderr
        assert "ended badly" in lab.script("up").stdout
        assert hosts(lab) == ["n1"]
    assert remains(lab) == []


def test_lab_without_network_namespaces_cannot_limit_rates() -> None:
    with started("-plain", N="2", DBD="0", NETNS="0", PORT="27800") as lab:
        assert len(hosts(lab, "-N2")) == 2
        refused = lab.script("rate", "1gbit", check=False)
        assert refused.returncode == 1
        assert "NETNS=1" in refused.stderr
    assert remains(lab) == []


def test_start_and_shutdown_keep_foreign_folders_and_namespaces(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    foreign = Lab(tmp_path, "foreign")
    for command in ("up", "down"):
        refused = foreign.script(command, check=False)
        assert refused.returncode == 1
        assert "no lab" in refused.stderr
    assert (tmp_path / "letter").read_text() == "dear"
    conflict = Lab(Path(f"{lab.folder}-b"), lab.prefix).script("up", check=False)
    assert f"LAB={lab.folder} slurm/lab down" in conflict.stderr
    assert not Path(f"{lab.folder}-b").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"N": "0"}, "N=0: 1 to 200"), ({"N": "x"}, "a whole number"), ({"GPUS": "99"}, "at most 64")],
)
def test_invalid_settings_are_refused(settings: dict[str, str], expected: str, tmp_path: Path) -> None:
    refused = Lab(tmp_path / "none", "none", settings).script("up", check=False)
    assert refused.returncode == 1
    assert expected in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "none").exists()


def test_missing_packages_are_named(tmp_path: Path) -> None:
    script = tmp_path / "lab"  # its PATH has only programs of a machine without SLURM
    script.write_text(SCRIPT.read_text().replace("PATH=$PATH:/usr/sbin:/sbin", f"PATH={tmp_path}"))
    for name in ("bash", "id", "realpath", "dirname", "cat", "seq", "sed", "grep", "ls"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    environment = os.environ | {"LAB": str(tmp_path / "none")}
    done = subprocess.run(["/bin/bash", str(script), "up"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"slurm/lab: not installed: slurmctld .*apt-get install slurm-wlm .*\n", done.stderr)


@pytest.mark.xdist_group("cores")
def test_link_rates_are_limited_and_bytes_counted(lab: Lab) -> None:
    size = 4_000_000

    def transfer() -> float:
        with lab.background(["node", "2"], ["python3", "-c", RECEIVE]) as receiver:
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
        # Two token buckets of 128 kB pass without delay; the other bytes pass at the rate.
        assert transfer() > (size - 2 * 131072) * 8 / 20e6
    finally:
        lab.rate("none")
    assert "tbf" not in lab.node(1, ["tc", "qdisc"])


def test_jobs_get_distinct_gpus_features_and_time_limits(lab: Lab, tmp_path: Path) -> None:
    show, release_file = "echo $CUDA_VISIBLE_DEVICES", tmp_path / "release"
    show_and_wait = f"{show}; until [ -e {release_file} ]; do sleep 0.1; done"
    one = ["srun", "-w", "n1", "--mem=1G"]
    with lab.background(["exec"], [*one, "--gres=gpu:v100:3", "bash", "-c", show_and_wait]) as first:
        first_gpus = first.stdout.readline().strip().split(",")
        second_gpus = lab.run([*one, "--gres=gpu:5", "bash", "-c", show]).stdout.strip().split(",")
        release_file.touch()
        assert first.wait() == 0
    assert len(first_gpus) == 3
    assert sorted(first_gpus + second_gpus) == [str(i) for i in range(8)]
    assert lab.run(["srun", "--gres=gpu:9", "true"], check=False).returncode != 0
    assert set(hosts(lab, "--constraint=rack2", "-N2")) == {"n3", "n4"}
    assert "2:00" in lab.run(["sinfo", "-h", "-p", "short", "-o", "%l"]).stdout
