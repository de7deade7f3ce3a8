"""Tests of pipeline stages that share CPU cores, with ends calculated by hand."""

from __future__ import annotations

import pytest

from repro.simulate.time.cross_stage import CoreWork, SharedCores


def ends(cores: SharedCores, *works: CoreWork) -> list[float | None]:
    """Return the end of each work, if every stage has one work."""
    for work in works:
        cores.add(work)
    ended = []
    while cores.works:
        ended += cores.advance()
    assert sorted(map(id, ended)) == sorted(map(id, works))
    return [work.end for work in works]


@pytest.mark.parametrize(
    ("oversubscription", "expected"),
    [
        # The first work runs alone for 1 s at twice the rate, then 2 s with the second, which then has 2 s left.
        (2.0, [3.0, 4.0]),
        # The first work does 1.5 of 4 s alone and ends at 3.5 s, when the second work has done 2.5 s.
        (1.5, [3.5, 4.5]),
        (1.0, [4.0, 5.0]),
    ],
)
def test_a_free_core_is_used_by_the_computing_stage(oversubscription: float, expected: list[float]) -> None:
    cores = SharedCores(oversubscription, stages=2)
    assert ends(cores, CoreWork(0.0, 4.0), CoreWork(1.0, 4.0)) == pytest.approx(expected)


def test_a_stage_uses_at_most_one_core() -> None:
    """Four stages share two cores: two that compute have a core each, three have two thirds of a core each."""
    assert ends(SharedCores(2.0, stages=4), CoreWork(0.0, 2.0), CoreWork(0.0, 2.0)) == [1.0, 1.0]
    three = [CoreWork(0.0, 2.0), CoreWork(0.0, 2.0), CoreWork(0.0, 4.0)]
    assert ends(SharedCores(2.0, stages=4), *three) == pytest.approx([1.5, 1.5, 2.5])


def test_time_advances_while_no_stage_computes() -> None:
    cores = SharedCores(1.0, stages=2)
    assert ends(cores, CoreWork(5.0, 1.0), CoreWork(7.0, 1.0)) == [6.0, 8.0]
    assert cores.now == 8.0


def test_works_with_equal_ends_are_returned_together() -> None:
    cores = SharedCores(1.0, stages=2)
    first, second, later = CoreWork(0.0, 2.0), CoreWork(0.0, 2.0), CoreWork(0.0, 3.0)
    for work in (first, second, later):
        cores.add(work)
    assert cores.advance() == [first, second]
    assert (first.end, later.end, cores.works) == (3.0, None, [later])
    assert later.left == 1.0
