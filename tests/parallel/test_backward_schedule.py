"""Tests of the order of a backward pass under stage 3, computed by hand for recorded forward passes."""

from __future__ import annotations

import pytest
from torch import Tensor

from repro.parallel.comm import Group
from repro.parallel.ledger import CommLedger
from repro.parallel.transports import NoTransport, Work
from repro.parallel.zero.backward_schedule import BackwardSchedule, ForwardPass
from repro.parallel.zero.partition import ModuleUse
from repro.parallel.zero.stage3_checks import UnitAgreement

OUTER, INNER = ModuleUse(""), ModuleUse("inner")
A, B = ModuleUse("a"), ModuleUse("b")
ENTERS, LEAVES = False, True


def forward(*events: str | tuple[int, ModuleUse]) -> ForwardPass:
    """Return a recorded forward pass; an event begins a visit, and `")"` ends the innermost visit."""
    run, open_visits = ForwardPass(True), []
    for event in events:
        if isinstance(event, str):
            run.end_visit(*open_visits.pop())
        else:
            open_visits.append(event)
            run.begin_visit(*event)
    return run


def test_backward_pass_visits_modules_in_reverse_order() -> None:
    """Visit 0 (unit 2) contains visit 1 (unit 0) and then visit 2 (unit 1)."""
    schedule = BackwardSchedule([forward((2, OUTER), (0, A), ")", (1, B), ")", ")")])
    assert schedule.visits == [(2, OUTER), (0, A), (1, B)]
    assert schedule.steps == [(ENTERS, 0), (ENTERS, 2), (LEAVES, 2), (ENTERS, 1), (LEAVES, 1), (LEAVES, 0)]
    assert schedule.next_entry == [2, 1, 1, None, None, None]
    assert schedule.frees_unit == [False, False, True, False, True, True]
    assert schedule.first_visit == {2: 0, 0: 1, 1: 2}
    # The exit of a block includes the entry of the visit that ended just before the block began.
    assert [schedule.steps_until_entry(visit) for visit in range(3)] == [1, 4, 2]
    assert [schedule.steps_until_exit(visit) for visit in range(3)] == [6, 5, 4]


def test_visits_that_end_together_are_entered_together() -> None:
    """Visit 1 is a block that ends with its last module, visit 2."""
    schedule = BackwardSchedule(
        [forward((3, ModuleUse("c")), ")", (0, OUTER), (1, A), ")", ")", (2, B), ")")]
    )
    assert schedule.steps[:4] == [(ENTERS, 3), (LEAVES, 3), (ENTERS, 1), (ENTERS, 2)]
    assert schedule.steps_until_exit(3) == 4
    assert schedule.steps_until_exit(1) == 7, "includes the entry of visit 0"
    assert schedule.steps[4:] == [(LEAVES, 2), (LEAVES, 1), (ENTERS, 0), (LEAVES, 0)]


def test_unit_is_freed_unless_open_or_entered_next() -> None:
    nested = BackwardSchedule([forward((0, OUTER), (0, INNER), (1, A), ")", ")", ")")])
    assert nested.steps == [*((ENTERS, v) for v in range(3)), *((LEAVES, v) for v in (2, 1, 0))]
    assert nested.frees_unit == [False, False, False, True, False, True]
    twice = BackwardSchedule([forward((0, A), ")", (0, A), ")")])
    assert twice.steps == [(ENTERS, 1), (LEAVES, 1), (ENTERS, 0), (LEAVES, 0)]
    assert twice.frees_unit == [False, False, False, True]
    assert twice.first_visit == {0: 0}
    apart = BackwardSchedule([forward((0, A), ")", (1, B), ")", (0, A), ")")])
    assert apart.frees_unit == [False, True, False, True, False, True]


def test_last_of_several_forward_passes_is_visited_first() -> None:
    runs = [forward((0, A), ")", (1, B), ")"), forward((0, A), ")")]
    schedule = BackwardSchedule(runs)
    assert [run.offset for run in runs] == [0, 2]
    assert schedule.visits == [(0, A), (1, B), (0, A)]
    assert [visit for leaves, visit in schedule.steps if leaves] == [2, 1, 0]
    assert schedule.next_entry == [1, 1, 0, 0, None, None]


def test_recomputation_runs_the_last_visit_not_yet_left() -> None:
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


def test_end_of_a_visit_closes_interrupted_inner_visits() -> None:
    run = ForwardPass(True)
    assert [run.begin_visit(0, OUTER), run.begin_visit(1, A), run.begin_visit(2, B)] == [0, 1, 2]
    assert run.end_visit(1, A) == 1
    assert run.open_visits == [0]
    assert run.ends == [1, 3, 3]
    with pytest.raises(RuntimeError, match="calls itself in its forward pass is not supported"):
        run.end_visit(1, A)


def test_forward_pass_has_a_live_graph_while_referenced() -> None:
    referenced, freed = ForwardPass(True), ForwardPass(True)
    graph = referenced.graph
    assert referenced.has_live_graph()
    assert not freed.has_live_graph()
    del graph
    assert not referenced.has_live_graph()


def test_ranks_exchange_the_last_60_flags() -> None:
    """Each of the 60 flags has a bit; earlier flags count as set."""
    agreement = UnitAgreement(Group("dp", (0, 1), 0, NoTransport(), CommLedger()))
    for indices in (range(0), range(60), (0, 59), (1,)):
        flags = [i in indices for i in range(60)]
        assert agreement.union(flags) == flags
        assert agreement.union([False, *flags]) == [True, *flags]


@pytest.mark.parametrize("number", [5, -1], ids=["index of a unit", "digest of a pass"])
def test_flags_of_a_rank_that_runs_other_modules_are_refused(number: int) -> None:
    """Flags are positive and have an additional bit; digests are negative and may have this bit."""

    class OtherModules(NoTransport):
        def all_gather(self, output: Tensor, input: Tensor) -> Work:
            output[1] = number
            return Work()

    agreement = UnitAgreement(Group("dp", (0, 1), 0, OtherModules(), CommLedger()))
    with pytest.raises(RuntimeError, match="module"):
        agreement.union([True, False])
