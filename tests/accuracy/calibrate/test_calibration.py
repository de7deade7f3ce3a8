"""Tests of `repro calibrate`: a small calibration, its file, and refused arguments."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.accuracy.calibrate import clock, plan
from repro.accuracy.calibrate.calibration import LocalMachine, run_calibration
from repro.accuracy.calibrate.document import STEP
from repro.accuracy.calibrate.fit import rate_of
from repro.accuracy.calibrate.target import run_rank
from repro.config import Layout, suites, systems
from repro.config.errors import ConfigError
from repro.config.links import OPERATIONS
from repro.config.timing import EXCHANGE, MESSAGE
from repro.emulate.compute_rate import COMPUTE_RATE_FACT
from repro.launch import local_launch
from repro.launch.job import Interrupt, Job
from repro.launch.rank_process import HeartbeatReader, HeartbeatWriter
from repro.report.text import machine as view
from repro.simulate.time.emulated import MESSAGE_CORES_FACT
from repro.simulate.trace.roles import roles, trace
from tests.accuracy.calibrate.small_cache import CACHE
from tests.training import tiny

LOCAL = ["calibrate", "--system", "local", "--gpus"]
TARGET = "repro.accuracy.calibrate.calibration.TARGET"
SMALL_CACHE = "tests.accuracy.calibrate.small_cache:run_rank"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a quick calibration with two ranks."""
    path = tmp_path_factory.mktemp("calibrate") / "here.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TARGET, SMALL_CACHE)
        assert cli.main([*LOCAL, "2", "--output", str(path), "--quick"]) == 0
    return path


@pytest.mark.slow
def test_calibration_file_is_a_system_file_without_private_data(calibrated: Path) -> None:
    text = calibrated.read_text()
    for word in (platform.node(), str(calibrated.parent), str(Path.home())):
        assert not word or word not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    system = systems.load_system_file(calibrated)
    assert system.devices_per_node.value == 2
    assert system.provenance is not None
    assert (system.provenance.ranks, system.provenance.repeats) == (2, plan.QUICK_REPEATS)
    facts = system.provenance.facts
    assert {"device", "threads", "load_before", "spread_of_calls", "error_of_rates"} <= set(facts)
    assert 1e8 < float(facts[COMPUTE_RATE_FACT]) < 1e13, "the rate of one rank, for the twins of `repro twin`"
    link = system.links["memory"]
    assert set(link.collectives) == set(OPERATIONS)
    for collective in link.collectives.values():
        assert [size for size, _ in collective.points] == list(plan.QUICK_PAYLOADS)
        assert [s for _, s in collective.points] == sorted(s for _, s in collective.points)
    assert 0 <= link.overlap_cost.value <= 1  # type: ignore[operator]
    device = system.device
    for number in (device.memory_bandwidth, device.peak_flops["fp32"], link.bandwidth, link.latency_s):
        assert number.value
        assert "measured" in number.source


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, zero=2, global_batch=4), Layout(tp=2, sp=True), Layout(pp=2, global_batch=4)],
    ids=["zero2", "sp", "pp"],
)
def test_every_operator_of_a_trace_has_a_rate(calibrated: Path, layout: Layout) -> None:
    """Every operator takes time, and the operators of a tiny step take less than 10 s."""
    rates = systems.load_system_file(calibrated).device.operators
    experiment = tiny(layout)
    for role in roles(experiment):
        seconds = [
            (times, rate_of(rates, o.name).seconds(flops=o.flops, nbytes=o.read + o.written))
            for times, o in trace(experiment, role, gloo=True).operators()
        ]
        assert min(s for _, s in seconds) > 0
        assert sum(times * s for times, s in seconds) < 10


def test_calibration_of_one_rank_has_no_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process is the rank, and measures the operators of one step."""

    def measure(self: LocalMachine, job: Job, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
        first = job.experiments[0]
        HeartbeatReader(tmp_path / "heartbeat", 1)
        heartbeat = HeartbeatWriter(tmp_path / "heartbeat", 0)
        found = run_rank(
            Job(experiments=[first]), rank=0, world=1, device="cpu", rendezvous="", heartbeat=heartbeat
        )
        return {"outcome": "ok", "results": [found[first.key]], "load": 0.0}

    monkeypatch.setattr(LocalMachine, "measure", measure)
    monkeypatch.setattr(clock, "cache_bytes", lambda device: CACHE)
    path = tmp_path / "one.toml"
    assert cli.main([*LOCAL, "1", "--output", str(path), "--quick", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["file"] == str(path)
    assert "collectives" not in document["system"]["links"]["memory"]
    assert systems.load_system_file(path).links["memory"].collectives == {}


def test_failed_rank_ends_the_command_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the cause and writes no file."""
    monkeypatch.setattr(TARGET, "repro.accuracy.calibrate.target:no_such_function")
    path = tmp_path / "a.toml"
    assert cli.main([*LOCAL, "1", "--output", str(path), "--quick"]) == 1
    assert "no_such_function" in capsys.readouterr().err
    assert not path.exists()


LAB = ["--profile", "lab.toml"]


INVALID = [
    ("dgx2", [], "--system = 'dgx2': must be local or local-gpu, or the system of a SLURM"),
    ("local", ["--gpus", "-1"], "--gpus = -1: must be an integer of at least 1"),
    ("local", ["--output", "a.json"], "--output = 'a.json': must be a file that ends in .toml"),
    ("local", ["--output", "dgx2.toml"], "must be a file name other than that of the packaged system dgx2"),
    ("local", ["--output", "no/such/folder/a.toml"], "a file in an existing folder"),
    ("local-gpu", [], "local, since this machine has no visible CUDA device"),
    ("local-gpu", ["--gpus", "9"], "local, since this machine has no visible CUDA device"),
    ("local", ["--nodes", "2"], "--nodes = 2: needs --profile, the SLURM profile of the cluster"),
    ("dgx2", LAB, "--system = 'dgx2': must be local, which is the system in the SLURM profile lab.toml"),
    ("local", [*LAB, "--nodes", "-1"], "--nodes = -1: must be an integer of at least 1"),
    ("local", [*LAB, "--gpus", "3"], "--gpus = 3: must be 1 to 2, the number of ranks per node"),
    ("local", ["--profile", "shared.toml"], "--output = "),
    ("local", LAB, "SLURM does not answer: sinfo: not found"),
]


def test_invalid_arguments_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_launch, "count_cuda_devices", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM commands
    lab = 'system = "local"\n[slurm]\ntasks_per_node = 2\n'
    Path("lab.toml").write_text(lab)
    Path("shared.toml").write_text(f'{lab}[storage]\nshared = "{tmp_path}/elsewhere"\n')
    for system, arguments, message in INVALID:
        assert cli.main(["calibrate", "--system", system, *arguments]) == 2
        out = capsys.readouterr()
        assert (out.out, len(out.err.splitlines())) == ("", 1)
        assert out.err.startswith("error: ")
        assert message in out.err


def test_invalid_arguments_do_not_import_torch() -> None:
    code = "import sys, repro.cli\nprint(repro.cli.main(['calibrate', '--system', 'dgx2']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2 False", done.stderr


@pytest.mark.slow
def test_suite_calibration_measures_the_operators_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that differ in their network alone are measured once, and links with single messages only. Ranks on one
    core also run the steps without messages."""
    suite, text = tmp_path / "suite.toml", '[suite]\nname = "small"\n[defaults]\nmodel = "own"\n'
    text += "[models.own]\nlayers = 1\nhidden = 24\nheads = 2\nvocab = 48\nseq = 8\n"
    for name, between in (("one", "1e7"), ("same-on-another-network", "2e7")):
        text += f'[[experiment]]\nname = "{name}"\nlayout = {{ dp = 2, micro_batch = 1 }}\n'
        text += f"network = {{ nodes = 2, ranks_per_node = 1, between = {between} }}\n"
    suite.write_text(f'{text}[[experiment]]\nname = "alone"\n')
    found = plan.suite_experiments([suites.load_suite(suite)] * 2, "local", 2, quick=True)
    assert [e.name for e in found] == ["one"]
    assert found[0].network is None
    with pytest.raises(ConfigError, match="3 ranks"):
        plan.suite_experiments([suites.load_suite(suite)], "local", 3, quick=True)
    output = tmp_path / "here.toml"
    monkeypatch.setattr(TARGET, SMALL_CACHE)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        answer = run_calibration("local", 2, output, None, 0, True, [suite], quiet=True)
    finally:
        os.sched_setaffinity(0, cores)
    assert answer.outcome == "ok", answer.reason
    system = systems.load_system_file(output)
    assert system.ranks_per_core == 2
    assert system.provenance is not None
    assert 0.1 < float(system.provenance.facts[STEP]) < 10, "the operators of the step"
    assert system.provenance.facts[MESSAGE_CORES_FACT] == 1, "the only core"
    assert system.device.operators[MESSAGE].fixed_s > 0
    assert system.device.operators[EXCHANGE].fixed_s > 0
    assert 0 <= system.timing.spread < 1
    assert 0 <= system.timing.jitter_s < 1
    view._print_calibrated(answer)
    assert "variance over mean" in capsys.readouterr().out
    links = system.links["memory"].collectives
    assert set(links) == {"all_reduce", "send"}
    assert not links["all_reduce"].groups, "only the ring of all ranks measures the CPU time of messages"
