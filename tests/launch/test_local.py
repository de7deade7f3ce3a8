"""Tests of local launches without rank processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from repro import cli, engines
from repro.config import EmulatedNetwork, Experiment, Layout
from repro.config.enums import Phase
from repro.config.models import load_model
from repro.config.sizes import RANKS_PER_CORE
from repro.emulate import lab
from repro.launch import local_launch, rank_process
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.rank_process import HeartbeatReader, HeartbeatWriter
from tests.clock import Clock
from tests.training import TINY


def experiment(world: int, system: str = "local", **keys: Any) -> Experiment:
    return Experiment(name="a", model=TINY, layout=Layout(dp=world), system=system, **keys)


def test_missing_resources_of_this_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launch, "count_cuda_devices", lambda: 2)
    monkeypatch.setattr(local_launch, "usable_cores", lambda: 2)
    monkeypatch.setattr(
        engines, "missing_library", lambda engine: "" if engine == "native" else f"engine {engine}"
    )
    monkeypatch.setattr(lab, "missing_requirement", lambda: "namespaces")
    limit, missing = 2 * RANKS_PER_CORE.value, local_launch.missing_resource
    assert missing(experiment(2, "dgx2")) == "2 GPUs of system dgx2"
    too_few = "3 GPUs of system local-gpu, but the number of visible GPUs is 2"
    assert [missing(experiment(world, "local-gpu")) for world in (2, 3)] == ["", too_few]
    most = f"{limit} ({RANKS_PER_CORE.value} a core: {RANKS_PER_CORE.why})"
    too_many = f"{limit + 1} processes (one per rank), but this machine runs at most {most}"
    assert [missing(experiment(world)) for world in (limit, limit + 1)] == ["", too_many]
    assert missing(experiment(1, engine="torch")) == "engine torch"
    network = EmulatedNetwork(nodes=2, ranks_per_node=1, between=1e6)
    assert missing(experiment(2, network=network)) == "namespaces"


def test_device_count_respects_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("", 0), ("-1", 0), ("0", 1), ("3, 5,", 2), ("GPU-1,GPU-2,GPU-3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert local_launch.count_cuda_devices() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver = Mock(nvmlDeviceGetCount=lambda: 4, NVMLError=RuntimeError)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert local_launch.count_cuda_devices() == 4
    driver.nvmlInit.side_effect = RuntimeError
    assert local_launch.count_cuda_devices() == 0


FREE = 10 * 10**9
SUITE = """
suite.name = "large"
experiment = [
    { name = "states", model = "gpt2-1.5b", layout = { dp = 2, zero = 1 } },
    { name = "batch", model = "gpt2-tiny", layout.micro_batch = 100_000 },
    { name = "meant", model = "gpt2-1.5b", layout.dp = 2, expect = "oom" },
    { name = "limited", model = "gpt2-1.5b", layout.dp = 2, limits.memory_bytes = 1_000_000_000 },
    { name = "small", model = "gpt2-tiny" },
]
"""
STATE_BYTES = 1_557_611_200 * (2 * 8 + 8)
"""fp32 parameters and gradients on both ranks, and the two Adam states, which ZeRO-1 partitions."""
INPUT_BYTES = 4 * 128 * 128 * 4
"""Block inputs of one sample: 4 blocks of gpt2-tiny, 128 tokens, hidden size 128, fp32."""


def test_experiments_above_the_free_memory_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check exempts experiments that should run out of memory and those with a limit that fits."""
    monkeypatch.setattr(local_launch, "memory_and_swap", lambda: FREE)
    suite, results = tmp_path / "large.toml", tmp_path / "results"
    suite.write_text(SUITE)
    assert cli.main(["run", str(suite), "--dry-run", "--json", "--results", str(results)]) == 0
    rows = json.loads(capsys.readouterr().out)
    reasons = {row["name"]: row["where"] for row in rows if row["state"] == "not here"}
    assert set(reasons) == {"states", "batch"}
    max_count = int(1_557_611_200 * FREE / STATE_BYTES)
    assert reasons["states"] == (
        "needs 37.4 GB of memory for model states alone, and 10 GB are free here; model = 'gpt2-1.5b' has "
        f"1,557,611,200 parameters, and at most {max_count:,} fit in this layout; "
        "`--evidence simulated` simulates the experiment here"
    )
    max_samples = int(reasons["batch"].split("at most ")[1].split(" ")[0])
    states = 16 * 7_248_640
    assert 0 <= FREE - states - max_samples * INPUT_BYTES < INPUT_BYTES
    assert cli.main(["run", str(suite), "--only", "states", "--results", str(results)]) == 2
    error = f'error: {suite}: experiment "states": not run: {reasons["states"]}\n'
    assert capsys.readouterr().err == error
    assert not results.exists()


@pytest.mark.parametrize(
    ("layout", "states", "samples"),
    [
        (Layout(cp=2, micro_batch=10), 2 * 16, 1),  # both ranks have all states and half of the tokens
        (Layout(cp=2, zero=3, micro_batch=10), 16, 1),
        (Layout(cp=2, dp=2, micro_batch=10), 4 * 16, 2),
    ],
)
def test_context_parallel_ranks_share_the_tokens_of_a_sample(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, states: int, samples: int
) -> None:
    large = Experiment(name="a", model=load_model("gpt2-tiny"), layout=layout)
    needed = states * 7_248_640 + 10 * samples * INPUT_BYTES
    monkeypatch.setattr(local_launch, "memory_and_swap", lambda: needed)
    assert local_launch.memory_shortage(large) == ""
    monkeypatch.setattr(local_launch, "memory_and_swap", lambda: needed - 1)
    assert "layout.micro_batch = 10, and at most 9 fit" in local_launch.memory_shortage(large)


def test_rank_environment_on_a_machine_and_an_emulated_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks divide the cores, and variables of the user take precedence."""
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local_launch.os, "sched_getaffinity", lambda pid: set(range(8)))
    before = dict(os.environ)
    world = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    variables = {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo", **world}
    assert local_launch.rank_environment(2, 3) == before | variables
    limited = {"MALLOC_MMAP_THRESHOLD_": "262144"}
    assert local_launch.rank_environment(2, 3, limited=True) == before | variables | limited
    assert local_launch.rank_environment(0, 9)["OMP_NUM_THREADS"] == "1"
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert local_launch._on_node(2, 5) == {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **place}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert local_launch.rank_environment(0, 1)["OMP_NUM_THREADS"] == "7"


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLaunch:
    """Return a launch of three ranks without processes: the second has ended, the third is stopped."""
    monkeypatch.setattr(local_launch, "scratch_parent", lambda: tmp_path)
    launched = LocalLaunch(Job(experiments=[experiment(3)], rounds=3, compare=True), tmp_path / "logs")
    launched.logs.mkdir()
    monkeypatch.setattr(launched, "poll", lambda rank: 1 if rank == 1 else None)
    monkeypatch.setattr(launched, "stopped", lambda rank: rank == 2)
    monkeypatch.setattr(launched, "_signal", Mock())
    return launched


def test_stack_dump_waits_only_for_running_ranks(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = rank_process.error_log_path(launched.logs, 0)
    log.write_text("a former one (most recent call first)\n")

    def write_third_time() -> None:
        if len(clock.slept) == 3:
            log.write_text(2 * log.read_text())

    clock = Clock(asleep=write_third_time).rules(monkeypatch, local_launch)
    launched.dump_stacks()
    launched._signal.assert_called_once_with(rank_process.STACKS_SIGNAL)
    assert len(clock.slept) == 3
    clock.now = 200.0
    launched.dump_stacks()
    excess_s = clock.now - 200.0 - rank_process.STACKS_TIMEOUT_S
    assert 0 <= excess_s < 2 * local_launch.STACKS_POLL_INTERVAL_S
    launched.close(keep_logs=None)
    assert launched._signal.call_args == call(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_reports_and_results_are_read_from_launch_files(launched: LocalLaunch, tmp_path: Path) -> None:
    assert (launched.report(0), launched.results(0)) == (None, None)
    (launched.folder / "rank-0.json").write_text('{"rank": 0, "outcome": "ok"}')
    for rank in range(3):
        assert launched.results(1) is None
        (launched.folder / f"finished-1-{rank}.json").write_text(f'{{"rank": {rank}}}')
    assert launched.report(0) == {"rank": 0, "outcome": "ok"}
    assert launched.results(1) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert Job.load(launched.folder / "job.json") == launched.job
    most = rank_process.MAX_ERROR_LOG_BYTES
    rank_process.error_log_path(launched.logs, 0).write_text("x" * 2 * most + "the end")
    assert launched.error_text(0) == "x" * (most - 7) + "the end"
    launched.ask_to_stop()
    assert (launched.folder / "stop").exists()
    launched.close(keep_logs=launched.logs)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert launched.error_text(7) == ""


def test_launcher_reads_the_last_position_of_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    heartbeats = HeartbeatReader(path, 3)
    heartbeat = HeartbeatWriter(path, 2)
    heartbeat.phase(1, 7, Phase.BACKWARD)
    assert str(heartbeats.position(2)) == "at step 7, backward"
    heartbeat.collective(123, "reduce_scatter", "dp")
    HeartbeatWriter(path, 0).phase(0, 6, Phase.FORWARD)
    position = heartbeats.position(2)
    assert position[:-1] == (1, 7, Phase.BACKWARD, 123, "reduce_scatter", "dp")
    assert str(position) == "at step 7, backward, after collective reduce_scatter #123 in group dp"
    assert heartbeats.position(0)[:4] == (0, 6, Phase.FORWARD, 0)
    assert not heartbeats.position(1).begun
    assert str(heartbeats.position(1)) == "at start-up"
    seen = [position.seconds]
    for phase in Phase:
        heartbeat.phase(0, 1, phase)
        seen.append(heartbeats.position(2).seconds)
        heartbeat.collective(1, "all_reduce", "tp")
        seen.append(heartbeats.position(2).seconds)
    assert seen == sorted(set(seen)), "every heartbeat counts as progress"
    heartbeat.finished(0, {"rank": 0})  # without a callback, the result is dropped
