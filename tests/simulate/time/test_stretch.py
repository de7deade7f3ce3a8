"""Tests of runs: consecutive items whose seconds do not depend on their start time."""

from __future__ import annotations

from repro.simulate.time.program import Await, Issue, OperatorBlock, Send, split_into_runs

BLOCK = OperatorBlock(1.0, (("matmul", 1.0),))
TP_ISSUE, TP_AWAIT = Issue(("x",), "tp", "block", 1.0), Await(("x",))
DP_ISSUE, DP_AWAIT = Issue(("y",), "dp", "gradients", 1.0), Await(("y",))
SEND = Send(1, 0, 8)


def test_a_run_contains_a_completed_tensor_parallel_collective() -> None:
    inside = [BLOCK, TP_ISSUE, BLOCK, TP_AWAIT, BLOCK]
    assert list(split_into_runs([*inside, SEND, BLOCK])) == [
        (True, inside),
        (False, [SEND]),
        (True, [BLOCK]),
        (False, []),
    ]


def test_a_world_or_unawaited_collective_ends_a_run() -> None:
    inside = [BLOCK, DP_ISSUE, BLOCK, DP_AWAIT]
    assert list(split_into_runs(inside)) == [(True, inside), (False, [])]
    across = Issue(("y",), "world", "norm", 1.0)
    assert list(split_into_runs([BLOCK, across, BLOCK, DP_AWAIT])) == [
        *((True, [BLOCK]), (False, [across]), (True, [BLOCK]), (False, [DP_AWAIT])),
        *((True, []), (False, [])),
    ]
    assert list(split_into_runs([BLOCK, TP_ISSUE, BLOCK])) == [
        *((True, [BLOCK]), (False, [TP_ISSUE])),
        *((True, [BLOCK]), (False, [])),
    ]


def test_a_run_ends_before_a_collective_in_flight() -> None:
    assert list(split_into_runs([BLOCK, TP_ISSUE, SEND, TP_AWAIT])) == [
        *((True, [BLOCK]), (False, [TP_ISSUE, SEND])),
        *((True, []), (False, [TP_AWAIT])),
    ]
