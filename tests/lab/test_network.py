"""Emulated networks, really built: what links carry, that nothing is left behind, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from repro.config import EmulatedNetwork
from repro.lab.network import NoNetwork, RunningNetwork
from tests.lab.on_networks import TOO_FAST
from tests.launch.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulation")]
SLOW = EmulatedNetwork(nodes=2, ranks_per_node=2, between=4e6, within=10e6)
EXCHANGE = """
import socket, statistics, struct, sys, time
HERE, THERE, SIZES = sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]]
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
    for size in SIZES:
        spent = []
        for _ in range(7):
            time.sleep(0.01)
            began = time.perf_counter()
            one.sendall(struct.pack("q", size) + bytes(size))
            one.recv(1)
            spent.append(time.perf_counter() - began)
        print(statistics.median(spent), flush=True)
"""


def messages(network: RunningNetwork, source: int, target: int, sizes: list[int]) -> list[float]:
    """Seconds of a message of each size from one rank to another, and of the one byte that answers it."""
    per_node = network.network.ranks_per_node
    address = f"10.77.{target // per_node}.{target % per_node + 1}"
    command = [sys.executable, "-c", EXCHANGE]
    receiver = subprocess.Popen(
        network.facts.command(target, [*command, "-", address]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = network.facts.command(source, [*command, "+", address, *map(str, sizes)])
        done = subprocess.run(sender, capture_output=True, text=True, check=True)
    finally:
        receiver.kill()
        receiver.communicate()
    return [float(line) for line in done.stdout.split()]


@pytest.mark.parametrize(("target", "rate"), [(1, SLOW.within), (2, SLOW.between)])
def test_a_single_message_takes_its_size_over_the_rate_of_the_slowest_link(target: int, rate: float) -> None:
    """Less what a full bucket lets pass at once, which is at most a frame and what comes while the kernel wakes up."""
    sizes = [30_000, 100_000, 1_000_000]
    with RunningNetwork(SLOW) as network:
        seconds = messages(network, 0, target, sizes)
        share = network.facts.payload_share
        frame = max(network.facts.mtu, rate * 200e-6 * 2)
    for size, spent in zip(sizes, seconds, strict=True):
        ideal = size / share / rate
        assert -(frame / rate + 400e-6) < spent - ideal < 0.05 * ideal + 1e-3, f"{size} bytes in {spent} s"


def test_every_link_is_measured_in_both_directions() -> None:
    with RunningNetwork(SLOW) as network:
        rates = network.facts.rates
    for kind, count, rate in (("rank", 4, SLOW.within), ("node", 2, SLOW.between)):
        for side in ("sends", "receives"):
            assert rates[f"{kind} {side}"] == pytest.approx([rate] * count, rel=0.05)


def test_ranks_of_a_node_are_not_held_where_no_rate_is_asked() -> None:
    with RunningNetwork(EmulatedNetwork(nodes=2, ranks_per_node=2, between=4e6)) as network:
        inside, outside = (messages(network, 0, target, [1_000_000])[0] for target in (1, 2))
    assert outside > 0.2
    assert inside < outside / 5


def test_what_the_machine_cannot_carry_is_refused_in_one_line() -> None:
    """The line names the link, what was asked and what was measured."""
    with pytest.raises(NoNetwork) as refused:
        RunningNetwork(TOO_FAST)
    assert "MB/s on its link and not 4e+03 MB/s, as asked: more than 5% off, 15 times" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_delay_is_kept_or_refused() -> None:
    """By whether the kernel has netem."""
    asked = EmulatedNetwork(nodes=2, ranks_per_node=1, between=4e6, delay_s=2e-3)
    try:
        with RunningNetwork(asked) as network:
            assert 4e-3 < network.facts.round_trip_s["between"] < 8e-3
    except NoNetwork as refused:
        said = str(refused)
    else:
        said = ""
    assert not said or "delay_s = 0.002 needs a kernel with netem" in said


def holders(facts_of: RunningNetwork) -> list[int]:
    """Processes that hold a network."""
    facts = facts_of.facts
    return [facts.keeper, *facts.ranks, *facts.nodes]


def gone(processes: list[int]) -> bool:
    """Whether none of these runs; a zombie does not."""
    return not any(
        psutil.pid_exists(one) and psutil.Process(one).status() != psutil.STATUS_ZOMBIE for one in processes
    )


def soon(processes: list[int]) -> bool:
    """Whether they are gone within some seconds."""
    end = time.monotonic() + 10
    while not gone(processes) and time.monotonic() < end:
        time.sleep(0.05)
    return gone(processes)


def test_nothing_is_left_when_it_is_closed_or_its_keeper_is_killed() -> None:
    with RunningNetwork(SLOW) as network:
        first = holders(network)
        assert not gone(first[:1])
    assert soon(first)
    with RunningNetwork(SLOW) as network:
        second = holders(network)
        os.kill(network.facts.keeper, signal.SIGKILL)
        assert soon(second)


def test_nothing_is_left_when_whoever_started_it_is_killed() -> None:
    program = (
        "import sys; from repro.config import EmulatedNetwork; from repro.lab.network import RunningNetwork\n"
        "f = RunningNetwork(EmulatedNetwork(nodes=2, ranks_per_node=2, between=4e6)).facts\n"
        "print(f.keeper, *f.ranks, *f.nodes, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    runner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert runner.stdout is not None
    found = [int(word) for word in runner.stdout.readline().split()]
    assert len(found) == 7
    runner.kill()
    runner.communicate()
    assert soon(found)


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
UNPRIVILEGED = """
import subprocess
from repro.config import EmulatedNetwork
from repro.lab.network import NoNetwork, RunningNetwork
try:
    network = RunningNetwork(EmulatedNetwork(nodes=2, ranks_per_node=1, between=4e6))
except NoNetwork as error:
    print("refused:", error)
else:
    assert network.facts.user_namespace
    inside = network.facts.command(1, ["cat", "/proc/net/dev"])
    print(subprocess.run(inside, capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_is_not_root_has_a_network_in_a_user_namespace(tmp_path: Path) -> None:
    needed = (
        "import subprocess as s, sys; s.run([sys.executable, '-c', 'import repro.lab.links'], check=True)"
    )
    pythons = [sys.executable, "/usr/bin/python3"]
    able = [
        one
        for one in pythons
        if subprocess.run([*AS_NOBODY, one, "-c", needed], cwd=tmp_path).returncode == 0
    ]
    if not able:
        pytest.skip("no Python here that somebody else may read, packages included")
    done = subprocess.run(
        [*AS_NOBODY, able[0], "-c", UNPRIVILEGED], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if "refused" in done.stdout:
        pytest.skip(f"user namespaces are not allowed here: {done.stdout}")
    assert "eth0" in done.stdout
