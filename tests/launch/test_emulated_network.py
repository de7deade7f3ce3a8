"""Tests of the byte counters, compute rate and core throttle of an emulated network's ranks, without a network."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from repro.config import EmulatedNetwork
from repro.config.network import CORES_SHARE
from repro.emulate import compute_rate
from repro.emulate.network import NoNetwork
from repro.launch.rank import emulated_network
from repro.launch.rank.emulated_network import (
    MAX_CATCH_UP_S,
    TIMER_INTERVAL_S,
    CoreThrottle,
    EmulatedNetworkRank,
)
from repro.parallel.transports import Work
from tests.clock import Clock

NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=2, between=1e6)


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the facts of the launcher on the network, and replace the measured rates of four ranks by constants."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"nodes": [11, 12], "cores": 2}))
    monkeypatch.setattr(
        emulated_network, "_compute_rates", lambda world, throttle: [1e9, 2e9, 3e9, 4e9][:world]
    )
    monkeypatch.setattr(emulated_network, "MAX_RATE_SPREAD", 1.2)
    monkeypatch.setattr(emulated_network.CoreAssignment, "apply", lambda self: None)
    monkeypatch.setattr(emulated_network.processes, "keep_freed_memory", lambda: None)
    return path


@pytest.mark.parametrize(
    ("nodes", "rank", "node_file"),
    [(2, 0, "/proc/11/net/dev"), (2, 1, ""), (2, 2, "/proc/12/net/dev"), (1, 0, "")],
)
def test_report_contains_interface_bytes_per_step_of_the_rank_and_its_node(
    facts: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, rank: int, node_file: str
) -> None:
    """The first rank of a node also reports the bytes of the node, and rank 0 reports the facts of the launcher."""
    links = {"between": 1e6} if nodes > 1 else {"within": 1e6}
    network_rank = EmulatedNetworkRank(EmulatedNetwork(nodes=nodes, ranks_per_node=2, **links), facts, rank)
    network_rank.throttle.stop()
    header = "Inter-| Receive | Transmit\n    lo: 1 1 1 1 1 1 1 1 1 1\n"
    rows = {"/proc/self/net/dev": f"{header}  eth0: 10 1 2 3 4 5 6 7 20 8\n"}
    rows[node_file] = f"{header}uplink:30 1 2 3 4 5 6 7 40 8\n"
    monkeypatch.setattr(emulated_network, "Path", lambda file: Mock(read_text=lambda: rows[file]))
    counted = network_rank.counters()
    assert counted == ([20, 10, 40, 30] if node_file else [20, 10])
    message = network_rank.report(counted, steps=2)
    assert (message.sent_bytes, message.received_bytes) == (10, 5)
    node = (message.node_sent_bytes, message.node_received_bytes)
    assert node == ((20, 15) if node_file else (None, None))
    assert message.facts == (json.loads(facts.read_text()) if rank == 0 else None)
    assert message.compute_flops_per_s == (1 + rank) * 1e9
    assert message.core_share == CORES_SHARE * 1 / (2 * nodes), "one of two cores is reserved for messages"
    with pytest.raises(OSError, match="/proc/self/net/dev has no interface eth1"):
        emulated_network._interface_counters("/proc/self/net/dev", "eth1")


def test_compute_rates_are_measured_on_all_ranks_simultaneously(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate includes the sleep of the throttle: 8 GFLOP in 0.5 s and a sleep of 1.5 s are 4 GFLOP/s."""
    clock = Clock().rules(monkeypatch, emulated_network)
    barrier = Mock()

    def flop_in(seconds: float, timer: Any) -> float:
        assert (seconds, timer) == (emulated_network.RATE_PROBE_S, clock.perf_counter)
        barrier.assert_called_once()
        clock.now += 0.5
        return 8e9

    def all_gather(rates: list[torch.Tensor], own_rate: torch.Tensor) -> None:
        for rank, rate in enumerate(rates):
            rate.copy_(own_rate * (1 + rank))

    monkeypatch.setattr(emulated_network.compute_rate, "count_flop", flop_in)
    monkeypatch.setattr(emulated_network, "dist", Mock(barrier=barrier, all_gather=all_gather))
    throttle = Mock(settle=lambda: clock.sleep(1.5))
    assert emulated_network._compute_rates(3, throttle) == [4e9, 8e9, 12e9]


def test_ranks_of_unequal_compute_rates_are_rejected(facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of 1 and 4 GFLOP/s differ by 3 GFLOP/s, which is 120 % of the mean of 2.5 GFLOP/s."""
    attempts = emulated_network.MAX_RATE_ATTEMPTS
    rates = iter([[1e9, 2e9, 3e9, 4e9]] * (2 * attempts - 1) + [[1e9] * 4])
    monkeypatch.setattr(emulated_network, "_compute_rates", lambda world, throttle: next(rates))
    monkeypatch.setattr(emulated_network, "MAX_RATE_SPREAD", 1.19)
    message = r"1 to 4 GFLOP/s, differ by 120% of their mean, above the limit of 119%"
    with pytest.raises(RuntimeError, match=message):
        EmulatedNetworkRank(NETWORK, facts, 0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "a running timer would kill the process"
    no_throttle: Any = None
    assert emulated_network._equal_rates(4, no_throttle) == [1e9] * 4, "the last attempt counts"


SHARE = 0.25


def test_throttle_limits_a_thread_to_its_core_share() -> None:
    throttle = CoreThrottle(SHARE)
    throttle.start()
    try:
        spent = computed = 0.0
        for _ in range(4):
            resumed_at = time.perf_counter() + 0.2  # the thread may compute from here on
            time.sleep(0.2)  # as during a wait for a message
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                sum(range(1000))
            computed += 0.05
            throttle.settle()
            spent += time.perf_counter() - resumed_at
    finally:
        throttle.stop()
    # The throttle permits catching up on scheduling delays, and the timer of the kernel fires late.
    assert computed < SHARE * spent + 4 * SHARE * MAX_CATCH_UP_S + TIMER_INTERVAL_S


class Clocks(Clock):
    """Clocks of a thread whose CPU time and scheduling delay a test sets, without timers of the kernel."""

    cpu_s = run_delay_s = oversleep_s = read_s = 0.0
    """`oversleep_s`: excess of a sleep over its requested duration. `read_s`: CPU time of a read of the delay."""
    timer_calls = Mock()

    def thread_time(self) -> float:
        return self.cpu_s

    def perf_counter(self) -> float:
        return self.cpu_s + self.now

    def sleep(self, seconds: float) -> None:
        self.now += self.oversleep_s
        super().sleep(seconds)

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        assert offset == 0
        self.cpu_s += self.read_s
        return f"{self.thread_time() * 1e9:.0f} {self.run_delay_s * 1e9:.0f} 7".encode()


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks(now=0.0).rules(monkeypatch, emulated_network)
    clocks.timer_calls = Mock()
    monkeypatch.setattr(emulated_network.os, "pread", clocks.pread)
    for name in ("signal", "setitimer"):
        monkeypatch.setattr(signal, name, getattr(clocks.timer_calls, name))
    return clocks


def test_throttle_sleeps_for_the_remainder_of_its_share(clocks: Clocks) -> None:
    throttle = CoreThrottle(SHARE)
    clocks.asleep = throttle.settle  # a tick of the timer during a sleep adds no sleep

    def settle_sleeps(cpu_s: float, run_delay_s: float = 0.0) -> list[float]:
        clocks.cpu_s += cpu_s
        clocks.run_delay_s += run_delay_s
        clocks.slept.clear()
        throttle.settle()
        return clocks.slept

    assert settle_sleeps(0.1) == pytest.approx([0.3])
    assert settle_sleeps(0.0) == []
    assert settle_sleeps(0.1, run_delay_s=0.2) == pytest.approx([0.1]), "the scheduling delay replaces sleep"
    clocks.oversleep_s = 0.015
    assert settle_sleeps(0.1) == pytest.approx([0.3])
    clocks.oversleep_s = 0.0
    assert settle_sleeps(0.1) == pytest.approx([0.285]), "the excess of the last sleep is subtracted"
    assert settle_sleeps(0.1, run_delay_s=10.0) == []
    assert settle_sleeps(0.1) == pytest.approx([0.3 - MAX_CATCH_UP_S]), "the catch-up is limited"


def test_reading_the_clocks_does_not_count_as_compute(clocks: Clocks) -> None:
    """At a share of 0.001, 100 reads of 10 µs would otherwise cause 1 s of sleep."""
    clocks.read_s = 1e-5
    throttle = CoreThrottle(1e-3)
    for _ in range(100):
        throttle.settle()
    assert clocks.slept == []


def test_started_throttle_settles_at_timer_ticks_and_before_waits(clocks: Clocks) -> None:
    """Other threads transfer messages during the wait, so the throttle delays only the compute thread."""
    waited: list[float] = []

    def wait() -> None:
        Work(finish=lambda: waited.append(sum(clocks.slept))).wait()

    throttle = CoreThrottle(SHARE)
    throttle.start()
    try:
        begin = [call.signal(signal.SIGVTALRM, throttle._tick)]
        begin += [call.setitimer(signal.ITIMER_VIRTUAL, TIMER_INTERVAL_S, TIMER_INTERVAL_S)]
        assert clocks.timer_calls.mock_calls == begin
        clocks.cpu_s += 0.1
        wait()
        assert waited == pytest.approx([0.3]), "the sleep precedes the wait"
        clocks.cpu_s += 0.1
        other = threading.Thread(target=wait)
        other.start()
        other.join()
    finally:
        throttle.stop()
    end = [call.setitimer(signal.ITIMER_VIRTUAL, 0), call.signal(signal.SIGVTALRM, signal.SIG_IGN)]
    assert clocks.timer_calls.mock_calls == [*begin, *end]
    wait()
    assert waited == pytest.approx([0.3, 0.3, 0.3]), "a stopped throttle does not sleep"


def test_throttle_settles_once_before_a_collective(clocks: Clocks) -> None:
    """The throttle also settles after the collective, even if the collective failed."""

    class Message(emulated_network.dist.Work):  # type: ignore[misc]
        def wait(self) -> None:
            clocks.cpu_s += 0.001
            if self is last:
                raise RuntimeError("closed")

    messages = [Message() for _ in range(3)]
    last = Message()
    throttle = CoreThrottle(SHARE)
    throttle._waits.append((Message, Message.wait))
    throttle.start()
    try:
        clocks.cpu_s += 0.1
        Work(*messages).wait()
        assert clocks.slept == pytest.approx([0.3])
        with pytest.raises(RuntimeError):
            Work(last).wait()
        assert clocks.slept == pytest.approx([0.3, 3 * 0.003])
        last = messages[0]
        with pytest.raises(RuntimeError):
            last.wait()
        assert clocks.slept == pytest.approx([0.3, 0.009, 0.003]), "a message outside of a collective"
    finally:
        throttle.stop()


def fake_measurement(monkeypatch: pytest.MonkeyPatch, returncode: int) -> None:
    """Let each measuring process report 8 GFLOP/s, on a machine with four cores."""
    process = SimpleNamespace(communicate=lambda: ("8e9\n", ""), returncode=returncode)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: process)
    monkeypatch.setattr(compute_rate, "usable_cores", lambda: 4)


@pytest.mark.parametrize(("ranks", "per_core"), [(16, 8), (2, 1), (1, 1)])
def test_ranks_compute_on_half_the_cores(ranks: int, per_core: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measurement(monkeypatch, returncode=0)
    assert compute_rate.rank_flops_per_s(ranks) == pytest.approx(8e9 * CORES_SHARE / per_core)
    fake_measurement(monkeypatch, returncode=-9)
    with pytest.raises(NoNetwork, match="could not be measured"):
        compute_rate.rank_flops_per_s(ranks)


def test_measured_compute_rate_is_plausible() -> None:
    assert 1e8 < compute_rate.rank_flops_per_s(1) < 1e13
