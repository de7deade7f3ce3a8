"""The schedule of stage 3's backward pass, worked out by hand for the forward passes that leave it."""

from __future__ import annotations

import pytest

from repro.parallel.comm import Group
from repro.parallel.ledger import CommLedger
from repro.parallel.transports import NoTransport
from repro.parallel.zero.backward_schedule import BackwardSchedule, ForwardPass
from repro.parallel.zero.partition import ModuleUse
from repro.parallel.zero.stage3_checks import UnitAgreement

OUTER, INNER = ModuleUse(""), ModuleUse("inner")
A, B = ModuleUse("a"), ModuleUse("b")
ENTERS, LEAVES = False, True


def forward(*events: str | tuple[int, ModuleUse]) -> ForwardPass:
    """A forward pass: visits that begin, and `")"` where the one that began last ends."""
    run, begun = ForwardPass(True), []
    for event in events:
        if isinstance(event, str):
            run.end_visit(*begun.pop())
        else:
            begun.append(event)
            run.begin_visit(*event)
    return run


def blocks() -> BackwardSchedule:
    """Unit 2 is what surrounds units 0 and 1, which are used one after the other: visits 0, 1 and 2."""
    return BackwardSchedule([forward((2, OUTER), (0, A), ")", (1, B), ")", ")")])


def test_what_was_used_last_comes_first_and_a_unit_is_left_before_the_next_is_entered() -> None:
    schedule = blocks()
    assert schedule.visits == [(2, OUTER), (0, A), (1, B)]
    assert schedule.steps == [(ENTERS, 0), (ENTERS, 2), (LEAVES, 2), (ENTERS, 1), (LEAVES, 1), (LEAVES, 0)]
    assert schedule.next_entry == [2, 1, 1, None, None, None]
    assert schedule.frees_unit == [False, False, True, False, True, True]
    assert schedule.first_visit == {2: 0, 0: 1, 1: 2}


def test_steps_that_have_been_taken_when_a_gradient_comes() -> None:
    """At a block's input the backward pass has left it, and entered what ended just before it began."""
    schedule = blocks()
    assert [schedule.steps_until_entry(visit) for visit in range(3)] == [1, 4, 2]
    assert [schedule.steps_until_exit(visit) for visit in range(3)] == [6, 5, 4]


def test_visits_that_end_together_are_entered_together() -> None:
    """A block whose last module is itself a unit, after another unit."""
    schedule = BackwardSchedule(
        [forward((3, ModuleUse("c")), ")", (0, OUTER), (1, A), ")", ")", (2, B), ")")]
    )
    assert schedule.steps[:4] == [(ENTERS, 3), (LEAVES, 3), (ENTERS, 1), (ENTERS, 2)]
    assert schedule.steps_until_exit(3) == 4
    assert schedule.steps_until_exit(1) == 7, "the unit before it is entered as well"
    assert schedule.steps[4:] == [(LEAVES, 2), (LEAVES, 1), (ENTERS, 0), (LEAVES, 0)]


def test_a_unit_stays_while_it_is_inside_another_visit_or_is_entered_next() -> None:
    nested = BackwardSchedule([forward((0, OUTER), (0, INNER), (1, A), ")", ")", ")")])
    assert nested.steps == [*((ENTERS, v) for v in range(3)), *((LEAVES, v) for v in (2, 1, 0))]
    assert nested.frees_unit == [False, False, False, True, False, True]
    twice = BackwardSchedule([forward((0, A), ")", (0, A), ")")])
    assert twice.steps == [(ENTERS, 1), (LEAVES, 1), (ENTERS, 0), (LEAVES, 0)]
    assert twice.frees_unit == [False, False, False, True]
    assert twice.first_visit == {0: 0}
    apart = BackwardSchedule([forward((0, A), ")", (1, B), ")", (0, A), ")")])
    assert apart.frees_unit == [False, True, False, True, False, True]


def test_several_passes_are_numbered_as_one_and_the_last_comes_first() -> None:
    runs = [forward((0, A), ")", (1, B), ")"), forward((0, A), ")")]
    schedule = BackwardSchedule(runs)
    assert [run.offset for run in runs] == [0, 2]
    assert schedule.visits == [(0, A), (1, B), (0, A)]
    assert [visit for leaves, visit in schedule.steps if leaves] == [2, 1, 0]
    assert schedule.next_entry == [1, 1, 0, 0, None, None]


def test_a_recomputed_visit_is_the_last_of_its_use_that_has_not_been_left() -> None:
    schedule = BackwardSchedule([forward((0, A), ")", (0, A), ")")])
    for done, visit in ((0, 1), (1, 1), (2, 0), (3, 0)):
        schedule.steps_taken = done
        assert schedule.begin_recomputation(0, A)
        assert schedule.open_visits == [visit]
        assert schedule.end_recomputation(0, A) == visit
        assert not schedule.open_visits
    schedule.steps_taken = 4
    assert not schedule.begin_recomputation(0, A)
    assert not schedule.begin_recomputation(1, B)
    assert not schedule.open_visits


def test_what_an_error_broke_off_is_closed_with_what_is_around_it() -> None:
    run = ForwardPass(True)
    assert [run.begin_visit(0, OUTER), run.begin_visit(1, A), run.begin_visit(2, B)] == [0, 1, 2]
    assert run.end_visit(1, A) == 1
    assert run.open_visits == [0]
    assert run.ends == [1, 3, 3]
    with pytest.raises(RuntimeError, match="calls itself in its forward pass is not supported"):
        run.end_visit(1, A)


def test_a_pass_outlives_the_next_while_somebody_holds_its_graph() -> None:
    kept, dropped = ForwardPass(True), ForwardPass(True)
    graph = kept.graph
    assert kept.has_live_graph()
    assert not dropped.has_live_graph()
    del graph
    assert not kept.has_live_graph()


def test_what_ranks_keep_is_told_of_the_last_60_passes() -> None:
    """Bit by bit, also the last one; what is more counts as kept."""
    same = UnitAgreement(Group("dp", (0, 1), 0, NoTransport(), CommLedger()))
    for kept in (range(0), range(60), (0, 59), (1,)):
        marks = [i in kept for i in range(60)]
        assert same.union(marks) == marks
        assert same.union([False, *marks]) == [True, *marks]
