"""Tests of the inspection of nodes for `repro doctor --profile`: the request and the checks of the answers."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from repro.launch.slurm.profile import Profile, parse_profile
from repro.launch.slurm.scheduler import SchedulerError
from repro.launch.slurm.submission import probe

SRUN = ["srun", "-N", "2", "--ntasks-per-node=1", "--time=5", "--job-name=repro-doctor"]
ALL_KEYS: dict[str, Any] = {
    "slurm": {
        "partition": "gpu",
        "account": "lab",
        "qos": "long",
        "constraint": "nvlink",
        "exclude": ["n3", "n4"],
        "gpus_per_node": 8,
        "gpu_type": "v100",
        "gpu_request": "gres",
        "options": {"mail_type": "END"},
    },
    "environment": {
        "modules": ["cuda"],
        "python": "/opt/my python",
        "container": "i.sqsh",
        "container_mounts": "/data",
    },
}


def site(**tables: Any) -> Profile:
    return parse_profile(tables, file="mine.toml")


@pytest.mark.parametrize(
    ("tables", "options", "python"),
    [
        ({}, [], sys.executable),
        (
            ALL_KEYS,
            [
                *("--partition=gpu", "--account=lab", "--qos=long", "--constraint=nvlink", "--exclude=n3,n4"),
                *(
                    "--container-image=i.sqsh",
                    "--container-mounts=/data",
                    "--mail-type=END",
                    "--gres=gpu:v100:8",
                ),
            ],
            "/opt/my python",
        ),
        ({"slurm": {"gpus_per_node": 4}}, ["--gpus-per-node=4"], sys.executable),
        ({"slurm": {"gpus_per_node": 4, "gpu_request": "none"}}, [], sys.executable),
    ],
)
def test_probe_requests_nodes_with_the_options_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any], options: list[str], python: str
) -> None:
    commands: list[list[str]] = []
    answers = ["hello from a prologue"] + [json.dumps({"host": host}) for host in ("n1", "n2")]

    def call(command: list[str], timeout_s: float) -> str:
        commands.append(command)
        assert timeout_s == probe.PROBE_TIMEOUT_S
        (marker,) = tmp_path.iterdir()
        assert marker.read_text() == marker.name.removeprefix(".probe-")
        start = f"exec {shlex.quote(python)} -m {probe.__name__} {marker}"
        setup = "umask 077" + (" && module load cuda" if tables is ALL_KEYS else "")
        assert command[-3:] == ["bash", "-c", f"{setup} && {start}"]
        return "\n".join(answers)

    monkeypatch.setattr(probe, "run_slurm_command", call)
    assert probe.probe_nodes(site(**tables), tmp_path, 2) == [{"host": "n1"}, {"host": "n2"}]
    assert [command[:-3] for command in commands] == [[*SRUN, *options]]
    assert list(tmp_path.iterdir()) == []
    del answers[1]
    with pytest.raises(SchedulerError, match="1 of 2 nodes answered"):
        probe.probe_nodes(site(**tables), tmp_path, 2)


V100 = {"name": "Tesla V100-SXM3-32GB", "memory_bytes": 34_057_748_480, "compute_capability": "7.0"}


def answer(host: str, **more: Any) -> dict[str, Any]:
    versions = {"repro": "1", "torch": "2.6", "nvidia-nccl-cu12": "2.21"}
    interfaces = {"lo": "127.0.0.1", "ib0": "10.0.0.1", "ib1": ""}
    message = {
        "host": host,
        "folder": "",
        "interfaces": interfaces,
        "gpus": [V100] * 16,
        "versions": versions,
    }
    return {**message, "python": "3.12.1", **more}


def check_rows(nodes: list[dict[str, Any]], **tables: Any) -> dict[str, tuple[Any, ...]]:
    found = [(c.name, c.state, c.found, c.enables, c.fatal) for c in probe.check_nodes(site(**tables), nodes)]
    return {
        f"{name} {index}" if name == "GPUs there" else name: row for index, (name, *row) in enumerate(found)
    }  # type: ignore[misc]


DGX2: dict[str, Any] = {"system": "dgx2", "slurm": {"gpus_per_node": 16}}


def test_complete_nodes_pass_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "versions", lambda packages: {"torch": "2.6"})
    nodes = [answer("n1"), answer("n2", versions={"torch": "2.6", "nvidia-nccl-cu13": "2.27"})]
    fits = "GPUs of the profile's system"
    assert check_rows(nodes, **DGX2, environment={"interface": "ib0"}) == {
        "nodes": ["yes", "n1, n2", "python 3.12.1 and repro can be started on the nodes", False],
        "shared folder": [
            "yes",
            "nodes read and write files of this host",
            "jobs return their results",
            False,
        ],
        "interface": ["yes", "ib0 10.0.0.1", "carries collectives", False],
        "torch": ["yes", "n1: torch 2.6; n2: torch 2.6", "ranks start", False],
        "GPUs there 4": ["yes", "n1: 16 x Tesla V100-SXM3-32GB", fits, False],
        "GPUs there 5": ["yes", "n2: 16 x Tesla V100-SXM3-32GB", fits, False],
        "NCCL": ["yes", "2.21, 2.27", "collectives between GPUs", False],
    }


def test_incomplete_nodes_fail_the_matching_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "versions", lambda packages: {"torch": "2.6"})
    incomplete = answer("n2", folder="other contents", interfaces={"lo": "127.0.0.1"}, versions={}, gpus=[])
    nodes = [answer("n1", versions={"torch": "2.6"}), incomplete]
    assert check_rows(nodes, **DGX2, environment={"interface": "ib0"}) == {
        "nodes": ["yes", "n1, n2", "python 3.12.1 and repro can be started on the nodes", False],
        "shared folder": ["no", "n2: other contents", "set storage.shared and --results", True],
        "interface": [
            *("no", "no interface ib0 with an address on n2; nodes have ib0 10.0.0.1, ib1"),
            *("change environment.interface", True),
        ],
        "torch": [
            *(
                "limited",
                "n1: torch 2.6; n2: torch missing",
                "this host has torch 2.6: set environment.python or environment.setup",
                False,
            ),
        ],
        "GPUs there 4": ["yes", "n1: 16 x Tesla V100-SXM3-32GB", "GPUs of the profile's system", False],
        "GPUs there 5": ["no", "n2: 0 x none", "slurm.gpus_per_node is 16", True],
        "NCCL": ["limited", "no NCCL package; torch may contain NCCL", "collectives between GPUs", False],
    }
    without = check_rows([answer("n1")])
    assert without["interface"] == [
        *(
            "limited",
            "environment.interface is empty; nodes have ib0 10.0.0.1, ib1",
            "NCCL and gloo choose an interface",
            False,
        ),
    ]
    assert set(without) == {"nodes", "shared folder", "interface", "torch"}, "the profile requests no GPUs"
    anywhere = check_rows([answer("n1", gpus=[{"name": "any"}] * 2)], slurm={"gpus_per_node": 2})
    assert anywhere["GPUs there 4"] == ["yes", "n1: 2 x any", "usable", False]
