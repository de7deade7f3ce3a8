"""Replaying a trace's events: what counts, what passes by, and where it ends."""

from __future__ import annotations

import pickle
import subprocess
import sys

from repro.simulate.memory.allocator import replay
from repro.simulate.memory.pools import MIB
from repro.simulate.trace.events import Alloc, Event, Free, Message, Operator, PhaseStart


def alloc(id: int, mebibytes: int, category: str = "activations") -> Alloc:
    return Alloc(id, mebibytes * MIB, category, "aten.empty", "repro/model/gpt.py:1")


STEP: list[Event] = [
    PhaseStart("init", -1),
    alloc(0, 40, "parameters"),
    PhaseStart("forward", 0),
    Operator("aten.mm", 1, 1, 1, (), 4),
    alloc(1, 30),
    alloc(2, 500, "host"),
    PhaseStart("backward", 0),
    alloc(3, 24),
    Free(1),
    Message("all_reduce", "dp", 4, 100, 150, "gradients"),
    alloc(4, 28),
    Free(2),
    Free(3),
    PhaseStart("optimizer", -1),
    Free(4),
    alloc(5, 50),
]


def test_peaks_with_their_phases() -> None:
    result = replay(STEP)
    assert result.peak_allocated == 94 * MIB
    assert result.peak_reserved == (40 + 30 + 24 + 50) * MIB
    assert (result.phase, result.out_of_memory) == ("optimizer", None)
    assert result.fragmentation == 1 - 94 / 144


def test_under_a_limit_empty_segments_make_room() -> None:
    result = replay(STEP, 100 * MIB)
    assert (result.retries, result.out_of_memory) == (1, None)
    assert (result.peak_reserved, result.phase) == (94 * MIB, "backward")


def test_it_ends_at_the_first_request_that_does_not_fit() -> None:
    result = replay(STEP, 80 * MIB)
    assert result.phase == "backward"
    assert result.out_of_memory is not None
    assert result.out_of_memory.requested == 24 * MIB
    assert not result.out_of_memory.by_fragmentation
    assert result.peak_allocated == 70 * MIB


def test_nothing_is_a_trace_too() -> None:
    result = replay([])
    assert (result.peak_reserved, result.phase, result.fragmentation) == (0, "", 0)


def test_released_and_restored_storages_keep_their_number() -> None:
    """ZeRO stage 3 frees a parameter between its uses."""
    result = replay([alloc(0, 40), Free(0), alloc(0, 40), Free(0), alloc(1, 40)])
    assert (result.peak_allocated, result.peak_reserved) == (40 * MIB, 40 * MIB)


def test_expandable_segments_keep_what_plain_ones_lose() -> None:
    """Activations that grow a little each time: each plain segment is too short for the next."""
    events: list[Event] = []
    for step in range(8):
        events += [alloc(2 * step, 30 + 2 * step), alloc(2 * step + 1, 30 + 2 * step)]
        events += [Free(2 * step), Free(2 * step + 1)]
    plain, expandable = replay(events), replay(events, expandable=True)
    assert plain.peak_allocated == expandable.peak_allocated == 88 * MIB
    assert plain.peak_reserved == sum(2 * (30 + 2 * step) for step in range(8)) * MIB
    assert expandable.peak_reserved == 100 * MIB


def test_results_cross_processes_and_need_no_torch() -> None:
    result = replay(STEP, 80 * MIB)
    again = pickle.loads(pickle.dumps(result))
    assert (again.phase, str(again.out_of_memory)) == (result.phase, str(result.out_of_memory))
    code = "import sys, repro.simulate.memory.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
