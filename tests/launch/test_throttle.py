"""A rank that is held to its share of a core: no faster when others wait, and no credit for waiting itself."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from repro.launch.rank import throttle as module
from repro.launch.rank.throttle import MAX_CATCH_UP_S, TIMER_INTERVAL_S, Throttle
from repro.parallel.transports import Work
from tests.clock import Clock

SHARE = 0.25


def compute(seconds: float) -> None:
    """Take so many seconds of the processor, however long they last."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@pytest.mark.parametrize("by", ["messages", "timer"])
def test_a_thread_computes_for_its_share_of_the_time_whether_it_waited_before_or_not(by: str) -> None:
    throttle = Throttle(SHARE)
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
    throttle = Throttle(SHARE)
    clocks.asleep = throttle.settle
    clocks.computed = 0.02
    throttle.settle()
    assert clocks.slept == [pytest.approx(0.02 / SHARE - 0.02)]


def test_it_sleeps_for_what_its_share_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    throttle = Throttle(SHARE)

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
    throttle = Throttle(SHARE)
    throttle.start()
    assert asked == [
        (signal.SIGVTALRM, throttle._tick),
        (signal.ITIMER_VIRTUAL, TIMER_INTERVAL_S, TIMER_INTERVAL_S),
    ]
    throttle.stop()
    assert asked[2:] == [(signal.ITIMER_VIRTUAL, 0), (signal.SIGVTALRM, signal.SIG_IGN)]


def test_it_settles_before_a_wait_which_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the thread that is held: others carry messages."""
    clocks = Clocks(monkeypatch)
    monkeypatch.setattr(module.signal, "setitimer", lambda *given: None)
    monkeypatch.setattr(module.signal, "signal", lambda *given: None)
    waited: list[float] = []
    throttle = Throttle(SHARE)
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
    throttle = Throttle(SHARE)
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
    throttle = Throttle(1e-3)
    for _ in range(100):
        throttle.settle()
    assert clocks.slept == []
