"""Tests of the inspection of nodes for `repro doctor --profile`: the request and the checks of the answers."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from repro.launch.slurm.profile import load_profile, parse_profile
from repro.launch.slurm.scheduler import SchedulerError
from repro.launch.slurm.submission import probe
from tests.launch.slurm.conftest import EVERY_KEY

SRUN = ["srun", "-N", "2", "--ntasks-per-node=1", "--time=5", "--job-name=repro-doctor"]
OPTIONS = ["partition=gpu", "account=lab", "qos=long", "constraint=nvlink", "exclude=n3,n[7-8]"]
OPTIONS += ["container-image=image.sqsh", "container-mounts=/data", "reservation=bench", "gres=gpu:v100:16"]
SETUP = ["umask 077", "module load cuda/12.6", "source /shared/venv/bin/activate", "export NCCL_IB_HCA=mlx5"]
NO_REQUEST = '[slurm]\ngpus_per_node = 4\ngpu_request = "none"\noptions = { mail_type = "END" }'


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (EVERY_KEY, OPTIONS),
        ("[slurm]\ngpus_per_node = 4", ["gpus-per-node=4"]),
        (NO_REQUEST, ["mail-type=END"]),
    ],
)
def test_probe_requests_nodes_with_the_options_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, options: list[str]
) -> None:
    setup, python = (SETUP, "/opt/my python") if text == EVERY_KEY else (SETUP[:1], sys.executable)
    answers = ["hello from a prologue"] + [json.dumps({"host": host}) for host in ("n1", "n2")]
    path, results = tmp_path / "mine.toml", tmp_path / "results"
    path.write_text(text)
    results.mkdir()

    def call(command: list[str], timeout_s: float) -> str:
        assert timeout_s == probe.PROBE_TIMEOUT_S
        (marker,) = results.iterdir()
        assert marker.read_text() == marker.name.removeprefix(".probe-")
        start = f"exec {shlex.quote(python)} -m {probe.__name__} {marker}"
        shell = ["bash", "-c", " && ".join([*setup, start])]
        assert command == [*SRUN, *(f"--{option}" for option in options), *shell]
        return "\n".join(answers)

    monkeypatch.setattr(probe, "run_slurm_command", call)
    assert probe.probe_nodes(load_profile(path), results, 2) == [{"host": "n1"}, {"host": "n2"}]
    assert list(results.iterdir()) == []
    del answers[1]
    with pytest.raises(SchedulerError, match="1 of 2 nodes answered"):
        probe.probe_nodes(load_profile(path), results, 2)


V100 = {"name": "Tesla V100-SXM3-32GB", "memory_bytes": 34_057_748_480, "compute_capability": "7.0"}
DGX2: dict[str, Any] = {"system": "dgx2", "slurm": {"gpus_per_node": 16}, "environment": {"interface": "ib0"}}
ANSWER: dict[str, Any] = {
    "host": "n1",
    "folder": "",
    "interfaces": {"lo": "127.0.0.1", "ib0": "10.0.0.1", "ib1": ""},
    "gpus": [V100] * 16,
    "versions": {"repro": "1", "torch": "2.6", "nvidia-nccl-cu12": "2.21"},
    "python": "3.12.1",
}


def check_rows(*nodes: dict[str, Any], **tables: Any) -> list[tuple[Any, ...]]:
    """Return the checks of nodes whose answers differ from `ANSWER` by the given keys; a fatal check ends in True."""
    answers, profile = [ANSWER | node for node in nodes], parse_profile(tables, file="mine.toml")
    checks = probe.check_nodes(profile, answers)
    return [(c.name, c.state, c.found, c.enables, *([True] if c.fatal else [])) for c in checks]


SIXTEEN = "16 x Tesla V100-SXM3-32GB"
STARTED, COLLECTIVES = "python 3.12.1 and repro can be started on the nodes", "collectives between GPUs"
RIGHT_GPUS = "these are the GPUs of the profile's system"


def test_complete_nodes_pass_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "versions", lambda packages: {"torch": "2.6"})
    second = {"host": "n2", "versions": {"torch": "2.6", "nvidia-nccl-cu13": "2.27"}}
    assert check_rows({}, second, **DGX2) == [
        ("nodes", "yes", "n1, n2", STARTED),
        ("shared folder", "yes", "nodes read and write files of this host", "jobs return their results"),
        ("interface", "yes", "ib0 10.0.0.1", "carries collectives"),
        ("torch", "yes", "n1: torch 2.6; n2: torch 2.6", "ranks start"),
        ("GPUs there", "yes", f"n1: {SIXTEEN}", RIGHT_GPUS),
        ("GPUs there", "yes", f"n2: {SIXTEEN}", RIGHT_GPUS),
        ("NCCL", "yes", "2.21, 2.27", COLLECTIVES),
    ]


def test_incomplete_nodes_fail_the_matching_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "versions", lambda packages: {"torch": "2.6"})
    incomplete: dict[str, Any] = {"host": "n2", "folder": "other contents", "versions": {}, "gpus": []}
    incomplete["interfaces"] = {"lo": "127.0.0.1"}
    other = {"host": "n3", "gpus": [{"name": "NVIDIA A100-SXM4-40GB", "compute_capability": "8.0"}] * 16}
    nodes = [{"versions": {"torch": "2.6"}}, incomplete, other | {"versions": {"torch": "2.6"}}]
    interface = "no interface ib0 with an address on n2; nodes have ib0 10.0.0.1, ib1"
    remedy = "this host has torch 2.6: set environment.python or environment.setup"
    mismatch = "dgx2 has NVIDIA V100 SXM3 32 GB, so no case would start: change the profile's system"
    assert check_rows(*nodes, **DGX2) == [
        ("nodes", "yes", "n1, n2, n3", STARTED),
        ("shared folder", "no", "n2: other contents", "set storage.shared and --results", True),
        ("interface", "no", interface, "change environment.interface", True),
        ("torch", "limited", "n1: torch 2.6; n2: torch missing; n3: torch 2.6", remedy),
        ("GPUs there", "yes", f"n1: {SIXTEEN}", RIGHT_GPUS),
        ("GPUs there", "no", "n2: 0 x none", "slurm.gpus_per_node is 16", True),
        ("GPUs there", "no", "n3: 16 x NVIDIA A100-SXM4-40GB", mismatch, True),
        ("NCCL", "limited", "no NCCL package; torch may contain NCCL", COLLECTIVES),
    ]


def test_profile_without_interface_or_gpus_has_no_such_requirement() -> None:
    rows = check_rows({})
    assert [row[0] for row in rows] == ["nodes", "shared folder", "interface", "torch"]
    interface = "environment.interface is empty; nodes have ib0 10.0.0.1, ib1"
    assert rows[2] == ("interface", "limited", interface, "NCCL and gloo choose an interface")
    anywhere = check_rows({"gpus": [{"name": "any"}] * 2}, slurm={"gpus_per_node": 2})
    assert anywhere[4] == ("GPUs there", "yes", "n1: 2 x any", "usable")


def test_node_program_compares_the_shared_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / ".probe-abc"
    marker.write_text("abc")
    monkeypatch.setattr("sys.argv", ["probe", str(marker)])
    runpy.run_path(probe.__file__, run_name="__main__")
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == ANSWER.keys()
    assert (answer["folder"], answer["interfaces"]["lo"]) == ("", "127.0.0.1")
    assert list(tmp_path.iterdir()) == [marker]
    marker.write_text("other")
    assert "other content on this node" in probe.inspect_node(marker)["folder"]
