"""What a rank on an emulated network hands in, and when the ranks are no equal devices; without a network."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.config import EmulatedNetwork
from repro.config.network import CORES_SHARE
from repro.launch.rank import emulated_network
from repro.launch.rank import emulated_network as module
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
    """What the launcher knows of the network, in whose place the ranks' rates are."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"nodes": [11, 12], "cores": 2}))
    monkeypatch.setattr(
        emulated_network, "_compute_rates", lambda world, throttle: [1e9, 2e9, 3e9, 4e9][:world]
    )
    monkeypatch.setattr(emulated_network, "MAX_RATE_SPREAD", 1.2)
    monkeypatch.setattr(emulated_network.CoreAssignment, "apply", lambda self: None)
    monkeypatch.setattr(emulated_network.processes, "keep_freed_memory", lambda: None)
    return path


def test_bytes_are_a_steps_and_a_nodes_first_rank_speaks_for_it(facts: Path) -> None:
    for rank, grown, node, known in (
        (0, [10, 20, 30, 40], (15, 20), True),
        (1, [10, 20], (None, None), False),
        (2, [10, 20, 30, 40], (15, 20), False),
    ):
        seen = EmulatedNetworkRank(NETWORK, facts, rank)
        seen.throttle.stop()
        message = seen.report(grown, steps=2)
        assert (message.sent_bytes, message.received_bytes) == (5, 10)
        assert (message.node_sent_bytes, message.node_received_bytes) == node
        assert message.facts == (json.loads(facts.read_text()) if known else None)
        assert message.compute_flops_per_s == (1 + rank) * 1e9
        assert message.core_share == CORES_SHARE * 1 / 4, "one of the two cores carries messages"


@pytest.mark.parametrize(
    ("nodes", "rank", "files"),
    [
        (2, 0, ["/proc/self/net/dev", "/proc/11/net/dev"]),
        (2, 1, ["/proc/self/net/dev"]),
        (2, 2, ["/proc/self/net/dev", "/proc/12/net/dev"]),
        (1, 0, ["/proc/self/net/dev"]),
    ],
)
def test_bytes_are_counted_where_they_leave_a_rank_and_its_node(
    facts: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, rank: int, files: list[str]
) -> None:
    links = {"between": 1e6} if nodes > 1 else {"within": 1e6}
    seen = EmulatedNetworkRank(EmulatedNetwork(nodes=nodes, ranks_per_node=2, **links), facts, rank)
    seen.throttle.stop()
    read: list[str] = []

    class File:
        def __init__(self, name: str):
            self.name = name

        def read_text(self) -> str:
            read.append(self.name)
            own = (
                "  eth0: 10 1 2 3 4 5 6 7 20 8\n" if "self" in self.name else "uplink:30 1 2 3 4 5 6 7 40 8\n"
            )
            return "Inter-| Receive | Transmit\n    lo: 1 1 1 1 1 1 1 1 1 1\n" + own

    monkeypatch.setattr(emulated_network, "Path", File)
    assert seen.counters() == [20, 10, 40, 30][: 2 * len(files)]
    assert read == files
    with pytest.raises(OSError, match="/proc/self/net/dev has no interface eth1"):
        emulated_network._interface_counters("/proc/self/net/dev", "eth1")


def test_rates_are_of_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is held to its share has the time of that too."""
    clock = Clock().rules(monkeypatch, emulated_network)
    done: list[Any] = []

    def flop_in(seconds: float, timer: Any) -> float:
        assert (seconds, timer) == (emulated_network.RATE_PROBE_S, clock.perf_counter)
        done.append("computed")
        clock.now += 0.5
        return 8e9

    def settle() -> None:
        clock.now += 1.5

    def all_gather(rates: list[torch.Tensor], mine: torch.Tensor) -> None:
        for rank, rate in enumerate(rates):
            rate.copy_(mine * (1 + rank))

    monkeypatch.setattr(emulated_network.compute_rate, "count_flop", flop_in)
    monkeypatch.setattr(emulated_network.dist, "barrier", lambda: done.append("all there"))
    monkeypatch.setattr(emulated_network.dist, "all_gather", all_gather)
    throttle: Any = SimpleNamespace(settle=settle)
    assert emulated_network._compute_rates(3, throttle) == [4e9, 8e9, 12e9]
    assert done == ["all there", "computed"]


def test_ranks_have_some_attempts_to_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def rates(world: int, throttle: object) -> list[float]:
        tries.append(world)
        return [1.0, 1.0] if len(tries) == emulated_network.MAX_RATE_ATTEMPTS else [1.0, 2.0]

    monkeypatch.setattr(emulated_network, "_compute_rates", rates)
    nobody: Any = None
    assert emulated_network._equal_rates(2, nobody) == [1.0, 1.0]
    assert len(tries) == emulated_network.MAX_RATE_ATTEMPTS
    with pytest.raises(RuntimeError):
        emulated_network._equal_rates(2, nobody)
    assert len(tries) == 2 * emulated_network.MAX_RATE_ATTEMPTS


def test_ranks_of_unequal_rates_are_refused(facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest and the slowest are three apart, the mean is two and a half."""
    monkeypatch.setattr(emulated_network, "MAX_RATE_SPREAD", 1.19)
    with pytest.raises(
        RuntimeError, match=r"1 to 4 GFLOP/s, differ by 120% of their mean, above the limit of 119%"
    ):
        EmulatedNetworkRank(NETWORK, facts, 0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "the timer would kill the process at its end"


SHARE = 0.25


def compute(seconds: float) -> None:
    """Take so many seconds of the processor, however long they last."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@pytest.mark.parametrize("by", ["messages", "timer"])
def test_a_thread_computes_for_its_share_of_the_time_whether_it_waited_before_or_not(by: str) -> None:
    throttle = CoreThrottle(SHARE)
    if by == "timer":
        throttle.start()
    try:
        spent = computed = 0.0
        for _ in range(4):
            due = time.perf_counter() + 0.2  # from then on it could compute, also if it has no core yet
            time.sleep(0.2)  # as if for a message
            compute(0.05)
            computed += 0.05
            throttle.settle()
            spent += time.perf_counter() - due
    finally:
        throttle.stop()
    # What it was kept from its core for it may make up for, and the kernel's timer comes late.
    assert computed < SHARE * spent + 4 * SHARE * MAX_CATCH_UP_S + TIMER_INTERVAL_S


class Clocks(Clock):
    """Clocks of a thread that computes, and is kept from its core, only where it is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__(now=0.0)
        self.computed = self.kept = self.longer = 0.0
        """`longer`: than it was asked to, a sleep takes."""
        self.look_s = 0.0
        """Of processor time, that a look at how long the thread was kept from its core takes."""
        self.rules(monkeypatch, module)
        monkeypatch.setattr(module.os, "pread", self.pread)

    def thread_time(self) -> float:
        return self.computed

    def perf_counter(self) -> float:
        return self.computed + self.now

    def sleep(self, seconds: float) -> None:
        self.now += self.longer
        super().sleep(seconds)

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        assert offset == 0
        self.computed += self.look_s
        return f"{self.thread_time() * 1e9:.0f} {self.kept * 1e9:.0f} 7".encode()


def test_a_tick_of_the_timer_while_it_sleeps_is_not_paid_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    throttle = CoreThrottle(SHARE)
    clocks.asleep = throttle.settle
    clocks.computed = 0.02
    throttle.settle()
    assert clocks.slept == [pytest.approx(0.02 / SHARE - 0.02)]


def test_it_sleeps_for_what_its_share_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    throttle = CoreThrottle(SHARE)

    def settles(computed: float, kept: float = 0.0) -> list[float]:
        clocks.computed += computed
        clocks.kept += kept
        clocks.slept.clear()
        throttle.settle()
        return clocks.slept

    assert settles(0.1) == pytest.approx([0.3])
    assert settles(0.0) == []
    assert settles(0.1, kept=0.2) == pytest.approx([0.1]), "others have computed for so long"
    clocks.longer = 0.015
    assert settles(0.1) == pytest.approx([0.3])
    clocks.longer = 0.0
    assert settles(0.1) == pytest.approx([0.285]), "what it slept too long it gets back"
    assert settles(0.1, kept=10.0) == []
    assert settles(0.1) == pytest.approx([0.3 - MAX_CATCH_UP_S]), "and of what it was kept from this at most"


def test_the_timer_is_of_processor_time_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(module.signal, "signal", lambda *given: asked.append(given))
    monkeypatch.setattr(module.signal, "setitimer", lambda *given: asked.append(given))
    throttle = CoreThrottle(SHARE)
    throttle.start()
    assert asked == [
        (signal.SIGVTALRM, throttle._tick),
        (signal.ITIMER_VIRTUAL, TIMER_INTERVAL_S, TIMER_INTERVAL_S),
    ]
    throttle.stop()
    assert asked[2:] == [(signal.ITIMER_VIRTUAL, 0), (signal.SIGVTALRM, signal.SIG_IGN)]


def test_it_settles_before_a_wait_which_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the thread that computes is held back; other threads carry messages during the wait."""
    clocks = Clocks(monkeypatch)
    monkeypatch.setattr(module.signal, "setitimer", lambda *given: None)
    monkeypatch.setattr(module.signal, "signal", lambda *given: None)
    waited: list[float] = []
    throttle = CoreThrottle(SHARE)
    throttle.start()
    try:
        clocks.computed += 0.1
        Work(finish=lambda: waited.append(sum(clocks.slept))).wait()
        assert waited == pytest.approx([0.3]), "it slept before"
        clocks.computed += 0.1
        other = threading.Thread(target=Work(finish=lambda: waited.append(sum(clocks.slept))).wait)
        other.start()
        other.join()
        assert waited == pytest.approx([0.3, 0.3])
    finally:
        throttle.stop()
    Work(finish=lambda: waited.append(sum(clocks.slept))).wait()
    assert waited == pytest.approx([0.3, 0.3, 0.3]), "it is let go"


def test_it_settles_once_before_a_collective_of_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on to settle after it: also when the collective fails."""
    clocks = Clocks(monkeypatch)
    monkeypatch.setattr(module.signal, "setitimer", lambda *given: None)
    monkeypatch.setattr(module.signal, "signal", lambda *given: None)

    class Message(module.dist.Work):  # type: ignore[misc]
        def wait(self) -> None:
            clocks.computed += 0.001
            if self is last:
                raise RuntimeError("closed")

    messages = [Message() for _ in range(3)]
    last = Message()
    throttle = CoreThrottle(SHARE)
    throttle._waits.append((Message, Message.wait))
    throttle.start()
    try:
        clocks.computed += 0.1
        Work(*messages).wait()
        assert clocks.slept == pytest.approx([0.3])
        with pytest.raises(RuntimeError):
            Work(last).wait()
        assert clocks.slept == pytest.approx([0.3, 3 * 0.003])
        last = messages[0]
        with pytest.raises(RuntimeError):
            last.wait()
        assert clocks.slept == pytest.approx([0.3, 0.009, 0.003]), "a library's own message"
    finally:
        throttle.stop()


def test_what_a_thread_has_not_computed_it_does_not_pay_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the clocks is no computing either: at a thousandth of a core it would be seconds."""
    clocks = Clocks(monkeypatch)
    clocks.look_s = 1e-5
    throttle = CoreThrottle(1e-3)
    for _ in range(100):
        throttle.settle()
    assert clocks.slept == []
