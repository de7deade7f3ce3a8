"""Tests of `repro run` on an emulated network: bytes and rates of records, cores of ranks, and cleanup."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from repro.config import EmulatedNetwork, Experiment, Layout, Model, Training
from repro.emulate import compute_rate
from repro.launch.job import NETWORK_FILE, Job
from repro.launch.local_launch import LocalLaunch
from repro.util import processes
from repro.util.files import read_json
from tests.emulate.on_networks import experiments, most_over_ledger, run, suite
from tests.launch import runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulation")]
LAYOUTS = {"dp": "dp = 4", "zero": "dp = 4, zero = 2", "tp": "dp = 2, tp = 2"}


def test_interface_bytes_are_ledger_bytes_plus_headers(tmp_path: Path) -> None:
    body = "".join(
        f'[[experiment]]\nname = "{name}"\nnetwork = "slow"\nlaunch = "one"\nlayout = {{ {layout} }}\n'
        for name, layout in LAYOUTS.items()
    )
    code, err = run(suite(tmp_path, body), tmp_path / "results")
    assert code == 0, err
    found = {record.name: record for record in experiments(tmp_path / "results")}
    assert found.keys() == LAYOUTS.keys()
    for name, record in found.items():
        network = record.network
        assert network is not None
        assert network.rates["node sends"] == pytest.approx([8e6, 8e6], rel=0.05)
        assert len(network.compute_flops_per_s) == 4
        assert network.core_share < 1
        most = most_over_ledger(network)
        for rank, rows in enumerate(record.comm_by_rank):
            ledger = sum(row.sent_bytes for row in rows)
            # gloo adds a few hundred bytes to each of a step's few messages.
            assert ledger <= network.sent_bytes[rank] <= most * ledger + 20_000, (name, rank)
        assert len(network.node_sent_bytes) == 2
        if name == "zero":  # in a ring of all ranks, a chunk enters and leaves a node once
            ledger = max(sum(row.sent_bytes for row in rows) for rows in record.comm_by_rank)
            assert max(network.node_sent_bytes) <= most * ledger + 40_000
        if name == "tp":  # messages between ranks of a node do not cross its link
            outside = [sum(r.sent_bytes for r in rows if r.group == "dp") for rows in record.comm_by_rank]
            for node, sent in enumerate(network.node_sent_bytes):
                crossing = sum(outside[2 * node : 2 * node + 2])
                assert 0 < crossing <= sent <= most * crossing + 40_000


def test_link_rates_scale_with_the_compute_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Link rates given for ranks of 1.5 GFLOP/s are doubled for ranks of 3 GFLOP/s."""
    monkeypatch.setattr(compute_rate, "rank_flops_per_s", {4: 3e9}.__getitem__)
    network = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6, flops_per_s=1.5e9)
    model = Model(name="tiny", layers=2, hidden=16, heads=4, vocab=64, seq=16)
    experiment = Experiment(name="one", model=model, layout=Layout(dp=4), network=network)
    launched = LocalLaunch(Job(experiments=[experiment]), tmp_path / "logs", target=runs.FAKE)
    try:
        launched.start()
        facts = read_json(launched.folder / NETWORK_FILE)
    finally:
        launched.close(keep_logs=None)
    assert facts is not None
    assert facts["rates"]["node sends"] == pytest.approx([16e6, 16e6], rel=0.05)


def test_a_killed_run_leaves_no_process_and_no_network(tmp_path: Path) -> None:
    body = '[[experiment]]\nname = "long"\nnetwork = "slow"\nlayout = { dp = 4 }\ntraining.steps = 2000\n'
    process = runs.start(suite(tmp_path, body), tmp_path / "results", fake=False)
    started = psutil.Process(process.pid)
    # Ranks, the keeper, and the processes of the namespaces.
    runs.wait_for(lambda: len(started.children(recursive=True)) >= 4 + 1 + 7)
    children = started.children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_ranks_of_a_network_have_separate_cores_and_few_page_faults(tmp_path: Path) -> None:
    """Threads of gloo and of ZeRO's rings are not on compute cores; with one core, ranks and messages share the core.

    All ranks wait while one rank handles a page fault of up to 20 us. The test counts the page faults of each rank's
    main thread in five timed steps.
    """
    network = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6)
    model = Model(name="wide", layers=2, hidden=128, heads=4, vocab=64, seq=512)
    experiment = Experiment(
        name="long", model=model, layout=Layout(dp=4, zero=3), network=network, training=Training(steps=2000)
    )
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    compute, carrying = set(cores[:half]), set(cores[half:]) or set(cores)
    launched = LocalLaunch(Job(experiments=[experiment]), tmp_path / "logs")

    def ranks_after(step: int) -> list[psutil.Process]:
        runs.wait_for(lambda: all(launched.position(rank).step >= step for rank in range(4)))
        found = psutil.Process().children(recursive=True)
        return [rank for rank in found if "repro.launch.rank.program" in rank.cmdline()]

    try:
        launched.start()
        first = experiment.training.untimed_steps + 1
        before = {rank.pid: faults_of_thread(rank.pid) for rank in ranks_after(first)}
        after = {rank.pid: faults_of_thread(rank.pid) for rank in ranks_after(first + 5)}
        affinities = [
            {thread.id: os.sched_getaffinity(thread.id) for thread in psutil.Process(pid).threads()}
            for pid in before
        ]
    finally:
        launched.close(keep_logs=None)
    assert len(before) == 4
    assert max(after[rank] - before[rank] for rank in before) < 200, "pages of 4 kB"
    for rank, where in zip(before, affinities, strict=True):
        assert where.pop(rank) <= compute
        assert len(where) >= 4, "threads of gloo and of the ring"
        assert all(found <= carrying for found in where.values()), where


def faults_of_thread(thread: int) -> int:
    """Return the minor page faults of a process's first thread (proc(5))."""
    fields = Path(f"/proc/{thread}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])


def test_an_impossible_network_is_the_error_of_a_record(tmp_path: Path) -> None:
    """Two links per core send 4 GB/s at once, and a core can carry one such link."""
    nodes = min(4 * processes.usable_cores(), 200)
    network = f"{{ nodes = {nodes}, ranks_per_node = 1, between = 4e9 }}"
    body = f'[[experiment]]\nname = "fast"\nlayout = {{ dp = {nodes} }}\nnetwork = {network}\n'
    code, _ = run(suite(tmp_path, body), tmp_path / "results")
    assert code == 1
    (record,) = experiments(tmp_path / "results")
    assert record.outcome == "error"
    message = "MB/s on its link instead of 4e+03 MB/s: 15 measurements differ by more than 5%"
    assert message in record.reason
    assert "\n" not in record.reason
