"""Tests of emulated networks in kernel namespaces: rates of links, cleanup of processes, and refused networks."""

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

from repro.config import EmulatedNetwork
from repro.emulate.network import NoNetwork, RunningNetwork

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


def end_soon(processes: list[int]) -> bool:
    """Return whether all processes end within 60 s; a zombie has ended."""
    _, alive = psutil.wait_procs(
        [psutil.Process(one) for one in processes if psutil.pid_exists(one)], timeout=60
    )
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_no_process_remains_after_close_or_kill_of_keeper() -> None:
    """`test_run.py` kills the program that started the network."""
    for is_killed in (False, True):
        with closing(start_network(SLOW)) as network:
            keeper = network.facts.keeper
            processes = [keeper, *network.facts.ranks, *network.facts.nodes]
            assert psutil.Process(keeper).status() != psutil.STATUS_ZOMBIE
            if is_killed:
                os.kill(keeper, signal.SIGKILL)
                assert end_soon(processes)
        assert end_soon(processes)


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
