"""Tests of `repro calibrate --profile` on a real SLURM: links within and between nodes, and cancelled jobs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from repro.config import Layout
from repro.config.systems import load_system_file
from repro.simulate.time.network import Network
from tests.slurm_lab.bench import Bench
from tests.slurm_lab.cluster import Lab

pytestmark = pytest.mark.slurm


def calibrate_command(bench: Bench, output: Path) -> list[str]:
    """Return the quick calibration command for two nodes with two ranks each."""
    command = ["repro", "calibrate", "--system", "local", "--profile", str(bench.profile), "--nodes", "2"]
    return [*command, "--gpus", "2", "--quick", "--output", str(output)]


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Bench:
    return Bench(lab, tmp_path, {"tasks_per_node": 2})


@pytest.mark.xdist_group("cores")
def test_calibration_measures_the_bandwidth_of_a_slow_network(lab: Lab, bench: Bench, tmp_path: Path) -> None:
    """A link of 400 Mbit/s has 0.05 GB/s plus the burst of its rate limit; memory is faster even on busy cores."""
    lab.rate("400mbit")
    try:
        lab.run(calibrate_command(bench, tmp_path / "two.toml"), timeout=500)
    finally:
        lab.rate("none")
    system = load_system_file(tmp_path / "two.toml")
    assert (system.nodes.value, system.devices_per_node.value) == (2, 2)
    network, memory = system.links["inter-node"].bandwidth.value, system.links["memory"].bandwidth.value
    assert 0.025e9 < network < 0.064e9
    assert memory > 2 * network
    provenance = system.provenance
    assert provenance.ranks == 4
    assert provenance.facts["slurm_nodes"] == "n1,n2"
    assert str(provenance.facts["slurm_job"]).isdigit()
    groups = Network(system, Layout(tp=2, dp=2))
    assert groups.seconds("all_reduce", "dp", 2**24) > 2 * groups.seconds("all_reduce", "tp", 2**24)
    assert list(tmp_path.glob(".repro*")) == []


def test_a_cancelled_calibration_job_gives_a_one_line_error(lab: Lab, bench: Bench, tmp_path: Path) -> None:
    with lab.background(["exec"], calibrate_command(bench, tmp_path / "dead.toml")) as process:
        lab.wait_for("a running job", lab.running)
        lab.run(["scancel", "--user=root"])
        message = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    errors = [line for line in message.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, message
    assert "cancel" in errors[0].lower()
    assert "Traceback" not in message
    assert not (tmp_path / "dead.toml").exists()


def test_ctrl_c_cancels_the_calibration_job(lab: Lab, bench: Bench, tmp_path: Path) -> None:
    with lab.background(["exec"], calibrate_command(bench, tmp_path / "stopped.toml")) as process:
        lab.wait_for("a running job", lab.running)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 130
        assert lab.jobs() == []
    assert not (tmp_path / "stopped.toml").exists()
    assert list(tmp_path.glob(".repro*")) == []
