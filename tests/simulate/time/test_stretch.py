"""Which items in a row take the same seconds whenever they begin."""

from __future__ import annotations

from repro.simulate.time.program import Await, Issue, OperatorBlock, Send, split_into_runs

BLOCK = OperatorBlock(1.0, (("matmul", 1.0),))
BEGINS, ENDS = Issue(("x",), "tp", "block", 1.0), Await(("x",))
ELSEWHERE, ARRIVES = Issue(("y",), "dp", "gradients", 1.0), Await(("y",))
SEND = Send(1, 0, 8)


def test_a_collective_of_the_inner_group_that_ends_is_inside() -> None:
    inside = [BLOCK, BEGINS, BLOCK, ENDS, BLOCK]
    assert list(split_into_runs([*inside, SEND, BLOCK])) == [
        (True, inside),
        (False, [SEND]),
        (True, [BLOCK]),
        (False, []),
    ]


def test_a_collective_across_stages_or_without_its_end_is_not_inside() -> None:
    inside = [BLOCK, ELSEWHERE, BLOCK, ARRIVES]
    assert list(split_into_runs(inside)) == [(True, inside), (False, [])]
    across = Issue(("y",), "world", "norm", 1.0)
    assert list(split_into_runs([BLOCK, across, BLOCK, ARRIVES])) == [
        *((True, [BLOCK]), (False, [across]), (True, [BLOCK]), (False, [ARRIVES])),
        *((True, []), (False, [])),
    ]
    assert list(split_into_runs([BLOCK, BEGINS, BLOCK])) == [
        *((True, [BLOCK]), (False, [BEGINS])),
        *((True, [BLOCK]), (False, [])),
    ]


def test_a_part_that_is_cut_while_a_collective_is_under_way_ends_before_it() -> None:
    assert list(split_into_runs([BLOCK, BEGINS, SEND, ENDS])) == [
        *((True, [BLOCK]), (False, [BEGINS, SEND])),
        *((True, []), (False, [ENDS])),
    ]
