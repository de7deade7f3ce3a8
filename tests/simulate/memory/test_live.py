"""Tests of live bytes by category, with events written by hand and with random events."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from repro.config.enums import ACCOUNTED, Category
from repro.simulate.memory.live_bytes import LiveBytes, measure_live_bytes
from repro.simulate.trace.events import Alloc, Event, Free, Mark, Operator, PhaseStart

EVENTS: list[Event] = [
    PhaseStart("init", -1),
    Alloc(1, 100, Category.OTHER, "empty", "model.py:1"),
    Mark(1, Category.PARAMETERS),
    PhaseStart("forward", 0),
    Alloc(2, 1000, Category.HOST, "empty", "offload.py:2"),
    Alloc(3, 30, Category.ACTIVATIONS, "mm", "model.py:3"),
    Operator("aten.mm", 1, 1, 1, (), 4),
    PhaseStart("backward", 0),
    Alloc(4, 20, Category.OTHER, "mul", "model.py:4"),
    Mark(4, Category.GRADIENTS),
    Free(3),
    Free(2),
    PhaseStart("optimizer", -1),
    Alloc(5, 30, Category.OTHER, "add", "adamw.py:5"),
    Free(5),
]


def test_host_memory_is_excluded_from_the_device_total() -> None:
    live = LiveBytes(EVENTS)
    after_each_change = [0, 100, 0, 100, 100, 130, 150, 130, 150, 120, 120, 150, 120]
    assert live.total.tolist() == after_each_change  # a change of category is two changes
    assert +Counter(live.after(-1)) == {"parameters": 100, "gradients": 20}


def test_the_peak_is_the_first_maximum_of_live_bytes() -> None:
    found = measure_live_bytes(EVENTS)
    assert (found.peak_bytes, found.init_peak_bytes, found.host_bytes) == (150, 100, 1000)
    assert (found.phase, found.line, found.operator) == ("backward", "model.py:4", "mul")
    at_peak = {"parameters": 100, "host": 1000, "activations": 30, "other": 20}
    assert +Counter(found.by_category) == at_peak
    assert found.states == {"parameters": 100, "gradients": 20, "optimizer": 0}
    assert (found.states_bytes, found.most[Category.GRADIENTS]) == (120, 20)
    empty = measure_live_bytes([])
    assert (empty.peak_bytes, empty.init_peak_bytes, empty.states_bytes, empty.host_bytes) == (0, 0, 0, 0)


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Draw allocations, releases and changes of category in any order."""
    events: list[Event] = []
    live: list[int] = []
    for number in range(draw(st.integers(0, 30))):
        kind = draw(st.sampled_from(["alloc", "alloc", "free", "mark", "phase", "operator"]))
        category = draw(st.sampled_from([Category.HOST, Category.ACTIVATIONS, Category.GRADIENTS]))
        if kind == "alloc":
            size = draw(st.integers(0, 3))
            events.append(Alloc(number, size, category, f"operator {number}", f"line {number}"))
            live.append(number)
        elif kind == "free" and live:
            events.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
        elif kind == "mark" and live:
            events.append(Mark(draw(st.sampled_from(live)), category))
        elif kind == "phase":
            events.append(PhaseStart(f"phase {number}", 0))
        else:
            events.append(Operator("aten.mm", 1, 1, 1, (), 4))
    return events


@given(traces())
def test_the_peak_equals_the_maximum_over_all_allocations(events: list[Event]) -> None:
    live, phase, peak = dict[int, tuple[Category, int]](), "", 0
    expected: tuple[object, ...] = (dict.fromkeys(ACCOUNTED, 0), "", "", "")
    for event in events:
        if isinstance(event, PhaseStart):
            phase = event.name
        elif isinstance(event, Free):
            live.pop(event.id)
        elif isinstance(event, Mark):
            live[event.id] = event.category, live[event.id][1]
        elif isinstance(event, Alloc):
            live[event.id] = event.category, event.bytes
            now = {key: sum(size for category, size in live.values() if category == key) for key in ACCOUNTED}
            total = sum(now.values()) - now[Category.HOST]
            if event.category != Category.HOST and total > peak:
                peak, expected = total, (now, phase, event.line, event.operator)
    found = measure_live_bytes(events)
    assert found.peak_bytes == peak
    assert (found.by_category, found.phase, found.line, found.operator) == expected


def test_page_locked_memory_is_rounded_and_retained() -> None:
    """An allocation of 5 bytes takes 8. A freed block serves only later allocations of its size."""

    def host(id: int, size: int) -> Alloc:
        return Alloc(id, size, Category.HOST, "", "")

    device = Alloc(9, 1000, Category.ACTIVATIONS, "", "")
    found = measure_live_bytes(
        [host(1, 5), device, host(2, 8), Free(1), host(3, 7), host(4, 4), Free(9), host(5, 1)]
    )
    assert found.host_bytes == 8 + 7 + 4 + 1
    assert found.host_reserved_bytes == 8 + 8 + 4 + 1
