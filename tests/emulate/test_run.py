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
from repro.util.files import read_json
from tests.emulate.on_networks import TOO_FAST, experiments, most_over_ledger, run, suite
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


def test_communication_threads_are_not_on_compute_cores(tmp_path: Path) -> None:
    """This includes the threads of ZeRO's rings. With one core, ranks and messages share the core."""
    network = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6)
    model = Model(name="tiny", layers=2, hidden=16, heads=4, vocab=64, seq=16)
    experiment = Experiment(
        name="long", model=model, layout=Layout(dp=4, zero=2), network=network, training=Training(steps=2000)
    )
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    compute, carrying = set(cores[:half]), set(cores[half:]) or set(cores)
    launched = LocalLaunch(Job(experiments=[experiment]), tmp_path / "logs")
    try:
        launched.start()
        untimed = experiment.training.untimed_steps
        runs.wait_for(lambda: all(launched.position(rank).step > untimed for rank in range(4)))
        for rank in psutil.Process().children(recursive=True):
            if "repro.launch.rank.program" not in rank.cmdline():
                continue
            where = {thread.id: os.sched_getaffinity(thread.id) for thread in rank.threads()}
            assert where.pop(rank.pid) <= compute
            assert len(where) >= 4, "threads of gloo and of the ring"
            assert all(found <= carrying for found in where.values()), where
    finally:
        launched.close(keep_logs=None)


def test_timed_steps_have_few_page_faults(tmp_path: Path) -> None:
    """All ranks wait while one rank handles a page fault of up to 20 us. The test counts the page faults of each
    rank's main thread in five timed steps."""
    network = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6)
    model = Model(name="wide", layers=2, hidden=128, heads=4, vocab=64, seq=512)
    experiment = Experiment(
        name="long", model=model, layout=Layout(dp=4, zero=3), network=network, training=Training(steps=2000)
    )
    launched = LocalLaunch(Job(experiments=[experiment]), tmp_path / "logs")
    first = experiment.training.untimed_steps + 1

    def faults(step: int) -> dict[int, int]:
        runs.wait_for(lambda: all(launched.position(rank).step >= step for rank in range(4)))
        found = psutil.Process().children(recursive=True)
        ranks = [rank.pid for rank in found if "repro.launch.rank.program" in rank.cmdline()]
        return {rank: faults_of_thread(rank) for rank in ranks}

    try:
        launched.start()
        before, after = faults(first), faults(first + 5)
    finally:
        launched.close(keep_logs=None)
    assert len(before) == 4
    assert max(after[rank] - before[rank] for rank in before) < 200, "pages of 4 kB"


def faults_of_thread(thread: int) -> int:
    """Return the minor page faults of a process's first thread (proc(5))."""
    fields = Path(f"/proc/{thread}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])


def test_an_impossible_network_is_the_error_of_a_record(tmp_path: Path) -> None:
    network = f"{{ nodes = {TOO_FAST.nodes}, ranks_per_node = 1, between = {TOO_FAST.between:g} }}"
    body = f'[[experiment]]\nname = "fast"\nlayout = {{ dp = {TOO_FAST.world} }}\nnetwork = {network}\n'
    code, _ = run(suite(tmp_path, body), tmp_path / "results")
    assert code == 1
    (record,) = experiments(tmp_path / "results")
    assert record.outcome == "error"
    assert "MB/s on its link instead of 4e+03 MB/s" in record.reason
