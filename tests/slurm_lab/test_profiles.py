"""Tests of profiles that do not fit the cluster: `repro submit` prints one error line and submits no job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.slurm_lab.bench import Bench, case
from tests.slurm_lab.cluster import Lab

pytestmark = pytest.mark.slurm


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
