"""Tests that bubble, order and memory of schedules equal the papers' formulas for any p, m and v."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import ConfigError
from repro.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    batches,
    bubble_ratio,
    build_schedule,
    chunks_of,
    dependency_of,
    in_flight,
    peak_in_flight,
    timeline,
)

Case = tuple[str, int, int, int]
times = st.fractions(min_value=Fraction(1, 10), max_value=10, max_denominator=10)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(("gpipe", "1f1b", "interleaved")))
    if name == "interleaved":
        p = draw(st.integers(2, 9))
        return name, p, p * draw(st.integers(1, 5)), draw(st.integers(2, 5))
    return name, draw(st.integers(1, 12)), draw(st.integers(1, 30)), 1


@settings(max_examples=150)
@given(cases(), times, times)
def test_bubble_equals_the_papers_formula(case: Case, forward: Fraction, backward: Fraction) -> None:
    _, p, m, v = case
    assert bubble_ratio(build_schedule(*case), forward, backward) == Fraction(p - 1, v * m)


@settings(max_examples=60)
@given(cases())
def test_every_stage_runs_every_action_once(case: Case) -> None:
    """All stages have the same order of forwards and of backwards; each backward follows its forward."""
    _, p, m, v = case
    schedule = build_schedule(*case)
    assert (len(schedule), chunks_of(schedule)) == (p, v)
    everything = {Action(kind, i, c) for kind in (FORWARD, BACKWARD) for i in range(m) for c in range(v)}
    for actions in schedule:
        assert (len(actions), set(actions)) == (2 * m * v, everything)
        position = {action: at for at, action in enumerate(actions)}
        assert all(position[replace(action, kind=FORWARD)] <= at for action, at in position.items())
    for kind in (FORWARD, BACKWARD):
        assert len({tuple(a for a in actions if a.kind == kind) for actions in schedule}) == 1


@settings(max_examples=60)
@given(cases(), times, times)
def test_actions_start_in_order_after_their_inputs(case: Case, forward: Fraction, backward: Fraction) -> None:
    _, p, _, v = case
    schedule = build_schedule(*case)
    slots = timeline(schedule, forward, backward)
    stop = {(stage, slot.action): slot.stop for stage, row in enumerate(slots) for slot in row}
    for stage, row in enumerate(slots):
        assert tuple(slot.action for slot in row) == schedule[stage]
        free = Fraction(0)
        for slot in row:
            assert slot.stop - slot.start == (forward if slot.action.kind == FORWARD else backward) / v
            needed = dependency_of(slot.action, stage, p, v)
            assert slot.start == max(free, stop[needed] if needed else Fraction(0))
            free = slot.stop


@settings(max_examples=120)
@given(cases())
def test_peak_in_flight_equals_the_papers_formula(case: Case) -> None:
    """The closed form also equals the peak over the actions."""
    name, p, m, v = case
    if name == "1f1b":
        expected = [min(m, p - stage) for stage in range(p)]
    elif name == "interleaved" and m > p:
        expected = [2 * (p - 1 - stage) + (v - 1) * p + 1 for stage in range(p)]
    else:
        expected = [m * v] * p
    assert [in_flight(actions) for actions in build_schedule(*case)] == expected
    assert [peak_in_flight(name, stage, p, m, v) for stage in range(p)] == expected


@settings(max_examples=60)
@given(cases())
def test_interleaved_schedules_exchange_messages_of_pairs(case: Case) -> None:
    _, p, m, v = case
    for stage, actions in enumerate(build_schedule(*case)):
        found = batches(actions, v)
        assert [action for batch in found for action in batch] == list(actions)
        kinds = ["".join(action.kind for action in batch) for batch in found]
        warm_up = 2 * (p - 1 - stage) + (v - 1) * p if m > p else m * v
        expected = ["F"] * warm_up + ["FB"] * (m * v - warm_up) + ["B"] * warm_up
        assert kinds == (expected if v > 1 else [action.kind for action in actions])


def test_schedules_print_their_actions_in_order() -> None:
    def second_stage(*case: Any) -> str:
        return " ".join(map(str, build_schedule(*case)[1]))

    assert second_stage("gpipe", 2, 2) == "F0 F1 B0 B1"
    assert second_stage("1f1b", 3, 3) == "F0 F1 B0 F2 B1 B2"
    interleaved = "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    assert second_stage("interleaved", 2, 4, 2) == interleaved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2, 1), "schedule = '2f2b': must be one of gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 2, 1), "stages = 0: must be an integer of at least 1"),
        (("gpipe", 2, 0, 1), "micro_batches = 0: must be an integer of at least 1"),
        (("1f1b", 2, 2, 2), "chunks = 2: must be 1 chunk per stage unless schedule = interleaved"),
        (
            ("interleaved", 2, 2, 1),
            "chunks = 1: must be at least 2 chunks per stage with schedule = interleaved",
        ),
        (
            ("interleaved", 1, 2, 2),
            "stages = 1: must be at least 2 pipeline stages with schedule = interleaved",
        ),
        (
            ("interleaved", 4, 6, 2),
            "micro_batches = 6: must be a multiple of stages = 4 with schedule = interleaved",
        ),
    ],
)
def test_invalid_schedules_are_refused(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule(*arguments)
    assert str(caught.value) == message


def test_times_must_be_positive_and_a_deadlock_names_its_actions() -> None:
    with pytest.raises(ConfigError, match="backward = '0': must be a time greater than 0"):
        bubble_ratio(build_schedule("1f1b", 2, 2), 1, 0)
    wrong = tuple(tuple(reversed(actions)) for actions in build_schedule("1f1b", 2, 1))
    with pytest.raises(ValueError, match=r"deadlock: B0 of stage \d waits for"):
        timeline(wrong)


def test_large_schedules_are_built_in_seconds_without_torch() -> None:
    code = (
        "import sys\n"
        "from repro.parallel.pipeline.schedule import build_schedule, bubble_ratio\n"
        "print(bubble_ratio(build_schedule('interleaved', 64, 512, 4)), 'torch' in sys.modules)"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=200)
    assert output.split() == ["63/2048", "False"]
