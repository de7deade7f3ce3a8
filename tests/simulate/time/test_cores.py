"""Stages that share processor cores, by hand: who is alone computes as fast as a core of its own."""

from __future__ import annotations

import pytest

from repro.simulate.time.cross_stage import CoreWork, SharedCores


def ends(cores: SharedCores, *works: CoreWork) -> list[float | None]:
    """When each ends, if no stage goes on to another."""
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
        # Alone for a second at twice the rate it has 2 s left, as long as both compute; then the other has 2 s left.
        (2.0, [3.0, 4.0]),
        # Alone for a second it does 1.5 s of 4; together until 3.5, by when the other has done 2.5 s.
        (1.5, [3.5, 4.5]),
        (1.0, [4.0, 5.0]),
    ],
)
def test_a_core_that_is_free_goes_to_who_computes(oversubscription: float, expected: list[float]) -> None:
    cores = SharedCores(oversubscription, stages=2)
    assert ends(cores, CoreWork(0.0, 4.0), CoreWork(1.0, 4.0)) == pytest.approx(expected)


def test_no_rank_has_more_than_its_share_of_all_cores_nor_more_than_one() -> None:
    """Four stages on four halves of cores: two that compute have a core each, three share two thirds of all."""
    assert ends(SharedCores(2.0, stages=4), CoreWork(0.0, 2.0), CoreWork(0.0, 2.0)) == [1.0, 1.0]
    three = [CoreWork(0.0, 2.0), CoreWork(0.0, 2.0), CoreWork(0.0, 4.0)]
    assert ends(SharedCores(2.0, stages=4), *three) == pytest.approx([1.5, 1.5, 2.5])


def test_while_nobody_computes_time_passes() -> None:
    cores = SharedCores(1.0, stages=2)
    assert ends(cores, CoreWork(5.0, 1.0), CoreWork(7.0, 1.0)) == [6.0, 8.0]
    assert cores.now == 8.0


def test_what_ends_at_once_ends_together() -> None:
    cores = SharedCores(1.0, stages=2)
    first, second, later = CoreWork(0.0, 2.0), CoreWork(0.0, 2.0), CoreWork(0.0, 3.0)
    for work in (first, second, later):
        cores.add(work)
    assert cores.advance() == [first, second]
    assert (first.end, later.end, cores.works) == (3.0, None, [later])
    assert later.left == 1.0
