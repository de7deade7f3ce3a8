"""Tests of emulated networks in kernel namespaces: rates of links, records of runs, and cleanup of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from repro.config import EmulatedNetwork, Experiment, Layout, Model, Training
from repro.emulate import compute_rate
from repro.emulate.network import NoNetwork, RunningNetwork
from repro.launch.job import NETWORK_FILE, Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.rank_process import process_state
from repro.util import processes
from repro.util.files import read_json
from tests.emulate.on_networks import experiments, most_over_ledger, run, suite
from tests.launch import runs
from tests.training import TINY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulation")]
SLOW = EmulatedNetwork(nodes=2, ranks_per_node=2, between=4e6, within=10e6)
EXCHANGE = """
import socket, struct, sys, time
HERE, THERE, SIZES = sys.argv[1], sys.argv[2], [part.split(":") for part in sys.argv[3:]]
if HERE == "-":
    server = socket.create_server((THERE, 5000))
    print("ready", flush=True)
    one, _ = server.accept()
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while size := one.recv(8, socket.MSG_WAITALL):
        left = struct.unpack("q", size)[0]
        while left:
            left -= len(one.recv(min(left, 1 << 20)))
        one.send(b"!")
else:
    one = socket.create_connection((THERE, 5000))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for size, most in SIZES:
        size, spent, end = int(size), [], time.monotonic() + 40
        while len(spent) < 7 or (min(spent) > float(most) and time.monotonic() < end):
            time.sleep(0.01)
            began = time.perf_counter()
            one.sendall(struct.pack("q", size) + bytes(size))
            one.recv(1)
            spent.append(time.perf_counter() - began)
        print(min(spent), flush=True)
"""


def send_times(network: RunningNetwork, source: int, target: int, limits: dict[int, float]) -> list[float]:
    """Return the seconds of a message of each size from one rank to another, including the reply of one byte.

    The value is the minimum of 7 repetitions, or of more until it is below `limits`: other processes only add time.
    """
    per_node = network.network.ranks_per_node
    address = f"10.77.{target // per_node}.{target % per_node + 1}"
    command = [sys.executable, "-c", EXCHANGE]
    receiver = subprocess.Popen(
        network.facts.exec_command(target, [*command, "-", address]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sizes = [f"{size}:{seconds}" for size, seconds in limits.items()]
        sender = network.facts.exec_command(source, [*command, "+", address, *sizes])
        done = subprocess.run(sender, capture_output=True, text=True, check=True)
    finally:
        receiver.kill()
        receiver.communicate()
    return [float(line) for line in done.stdout.split()]


def start_network(network: EmulatedNetwork) -> RunningNetwork:
    """Start a network; other tests on this machine may disturb the measurement of its rates, so try up to ten times."""
    for _ in range(9):
        try:
            return RunningNetwork(network)
        except NoNetwork as error:
            if "measurements differ" not in str(error):
                raise
    return RunningNetwork(network)


@pytest.fixture(scope="module")
def slow(emulation: None) -> Iterator[RunningNetwork]:
    with closing(start_network(SLOW)) as network:
        yield network


@pytest.mark.parametrize(("target", "rate"), [(1, SLOW.within), (2, SLOW.between)])
def test_message_time_is_size_over_the_slowest_rate(slow: RunningNetwork, target: int, rate: float) -> None:
    """A full token bucket lets a frame, and the bytes of one wake-up of the kernel, pass at once."""
    ideal = {size: size / slow.facts.payload_share / rate for size in (30_000, 100_000, 1_000_000)}
    limits = {size: 1.05 * seconds + 1e-3 for size, seconds in ideal.items()}
    found = send_times(slow, 0, target, limits)
    frame = max(slow.facts.mtu, rate * 200e-6 * 2)
    for size, spent in zip(ideal, found, strict=True):
        assert ideal[size] - frame / rate - 400e-6 < spent < limits[size], f"{size} bytes in {spent} s"


def test_every_link_is_measured_in_both_directions(slow: RunningNetwork) -> None:
    for kind, count, rate in (("rank", 4, SLOW.within), ("node", 2, SLOW.between)):
        for side in ("sends", "receives"):
            assert slow.facts.rates[f"{kind} {side}"] == pytest.approx([rate] * count, rel=0.05)


def test_links_inside_a_node_are_unlimited_without_a_rate() -> None:
    with closing(start_network(EmulatedNetwork(nodes=2, ranks_per_node=2, between=4e6))) as network:
        limits = {1: 0.04, 2: 1.0}
        inside, outside = (send_times(network, 0, to, {1_000_000: limit})[0] for to, limit in limits.items())
    assert outside > 0.2
    assert inside < limits[1]


def test_a_delay_is_applied_or_refused() -> None:
    """A delay needs a kernel with netem."""
    delayed = EmulatedNetwork(nodes=2, ranks_per_node=1, between=4e6, delay_s=2e-3)
    trips: list[float] = []
    try:
        while len(trips) < 10 and (not trips or min(trips) > 8e-3):  # other processes only add time
            with closing(RunningNetwork(delayed)) as network:
                trips.append(network.facts.round_trip_s["between"])
        assert 4e-3 < min(trips) < 8e-3
    except NoNetwork as refused:
        message = str(refused)
    else:
        message = ""
    assert not message or "delay_s = 0.002 needs a kernel with netem" in message


def test_no_process_remains_after_close_or_kill_of_keeper() -> None:
    """Another test kills the program that started the network."""
    for is_killed in (False, True):
        with closing(start_network(SLOW)) as network:
            keeper = network.facts.keeper
            pids = [keeper, *network.facts.ranks, *network.facts.nodes]
            assert process_state(keeper)
            if is_killed:
                os.kill(keeper, signal.SIGKILL)
                runs.wait_for(lambda pids=pids: not any(map(process_state, pids)), 60)
        runs.wait_for(lambda pids=pids: not any(map(process_state, pids)), 60)


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
UNPRIVILEGED = """
import subprocess
from repro.config import EmulatedNetwork
from repro.emulate.network import NoNetwork, RunningNetwork
try:
    network = RunningNetwork(EmulatedNetwork(nodes=2, ranks_per_node=1, between=4e6))
except NoNetwork as error:
    print("refused:", error)
else:
    assert network.facts.user_namespace
    inside = network.facts.exec_command(1, ["cat", "/proc/net/dev"])
    print(subprocess.run(inside, capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_unprivileged_users_have_a_network_in_a_user_namespace(tmp_path: Path) -> None:
    needed = (
        "import subprocess as s, sys; s.run([sys.executable, '-c', 'import repro.emulate.links'], check=True)"
    )
    pythons = [sys.executable, "/usr/bin/python3"]
    readable = [
        one
        for one in pythons
        if subprocess.run([*AS_NOBODY, one, "-c", needed], cwd=tmp_path).returncode == 0
    ]
    if not readable:
        pytest.skip("no Python with its packages is readable by other users")
    done = subprocess.run(
        [*AS_NOBODY, readable[0], "-c", UNPRIVILEGED], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if "refused" in done.stdout:
        pytest.skip(f"user namespaces are not allowed here: {done.stdout}")
    assert "eth0" in done.stdout


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
    experiment = Experiment(name="one", model=TINY, layout=Layout(dp=4), network=network)
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
    runs.wait_for(lambda: not any(process_state(child.pid) for child in children), 60)


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
