"""Tests of the replay of a trace's events by the allocator model."""

from __future__ import annotations

import pickle

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


def test_a_replay_reports_peaks_and_the_peak_phase() -> None:
    result, empty = replay(STEP), replay([])
    assert (result.peak_allocated, result.peak_reserved) == (94 * MIB, (40 + 30 + 24 + 50) * MIB)
    assert (result.phase, result.fragmentation) == ("optimizer", 1 - 94 / 144)
    assert result.out_of_memory is None
    assert (empty.peak_reserved, empty.phase, empty.fragmentation) == (0, "", 0)


def test_a_replay_releases_empty_segments_at_the_limit() -> None:
    result = replay(STEP, 100 * MIB)
    assert (result.retries, result.out_of_memory) == (1, None)
    assert (result.peak_reserved, result.phase) == (94 * MIB, "backward")


def test_a_replay_stops_at_the_first_out_of_memory() -> None:
    result = replay(STEP, 80 * MIB)
    assert (result.phase, result.peak_allocated) == ("backward", 70 * MIB)
    assert result.out_of_memory.requested == 24 * MIB
    assert not result.out_of_memory.by_fragmentation


def test_a_storage_can_be_freed_and_allocated_again() -> None:
    """ZeRO stage 3 frees a parameter after each use, and its next allocation has the same id."""
    result = replay([alloc(0, 40), Free(0), alloc(0, 40), Free(0), alloc(1, 40)])
    assert (result.peak_allocated, result.peak_reserved) == (40 * MIB, 40 * MIB)


def test_expandable_segments_reuse_memory_of_growing_activations() -> None:
    """Each activation is larger than its predecessors, so every plain segment is too small for it."""
    events: list[Event] = []
    for step in range(8):
        events += [alloc(2 * step, 30 + 2 * step), alloc(2 * step + 1, 30 + 2 * step)]
        events += [Free(2 * step), Free(2 * step + 1)]
    plain, expandable = replay(events), replay(events, expandable=True)
    assert plain.peak_allocated == expandable.peak_allocated == 88 * MIB
    assert plain.peak_reserved == sum(2 * (30 + 2 * step) for step in range(8)) * MIB
    assert expandable.peak_reserved == 100 * MIB


def test_replay_results_can_be_pickled() -> None:
    result = replay(STEP, 80 * MIB)
    restored = pickle.loads(pickle.dumps(result))
    assert (restored.phase, str(restored.out_of_memory)) == (result.phase, str(result.out_of_memory))
