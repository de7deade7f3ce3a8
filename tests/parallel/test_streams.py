"""No schedule's messages wait for each other for ever: on hosts that meet, on devices, and where code is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from repro.config import Layout
from repro.parallel.mesh import groups
from tests.parallel.streams import Compute, Meet, Message, Program, Wait, programs, starts, stuck

Case = tuple[str, int, int, int]


WITH_PIPELINES = [
    Layout(pp=pp, dp=dp, tp=tp, cp=cp, order=order, schedule=schedule, chunks=chunks, global_batch=dp * pp)
    for pp, dp, tp, cp in ((2, 2, 1, 1), (3, 1, 2, 1), (4, 2, 2, 1), (2, 2, 1, 2), (3, 2, 2, 1))
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2))
    for order in ("tp-dp-pp", "pp-dp-tp")
]


def cases(most_stages: int, most_micro_batches: int) -> list[Case]:
    """(schedule, p, m, v)."""
    return [
        (schedule, p, m, v)
        for schedule, chunks in (("gpipe", (1,)), ("1f1b", (1,)), ("interleaved", (2, 3)))
        for p in range(2, most_stages + 1)
        for m in range(1, most_micro_batches + 1)
        for v in chunks
        if schedule != "interleaved" or m % p == 0
    ]


SMALL = cases(4, 5)


def layout_of(case: Case) -> Layout:
    schedule, p, m, v = case
    return Layout(pp=p, global_batch=m, schedule=schedule, chunks=v)


@cache
def issued(case: Case, overlap: bool = True, connect: bool = True) -> list[Program]:
    return programs(replace(layout_of(case), overlap=overlap), connect=connect)


def that_hang(found: list[Case], overlap: bool = True, connect: bool = True, **how: Any) -> set[Case]:
    return {case for case in found if stuck(issued(case, overlap, connect), **how)}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "found", [SMALL, pytest.param(cases(8, 16), marks=pytest.mark.slow)], ids=["p4-m5", "p8-m16"]
)
def test_no_schedule_hangs(found: list[Case], overlap: bool) -> None:
    """Not if the first use of code waits for the device, nor if all streams are one queue; and where every computation
    waits for the device, only interleaved stages with more micro-batches than stages do that overlap."""
    assert not that_hang(found, overlap)
    assert not that_hang(found, overlap, loads="first")
    assert not that_hang(found, overlap, loads="first", one_queue=True)
    more = {case for case in found if overlap and case[0] == "interleaved" and case[2] > case[1]}
    assert that_hang(found, overlap, loads="always") == more


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_without_overlap_nothing_is_computed_while_messages_are_under_way(case: Case) -> None:
    for stage in issued(case, overlap=False, connect=False):
        messages = waits = 0
        for line in stage:
            messages += isinstance(line, Message)
            waits += isinstance(line, Wait)
            assert not isinstance(line, Compute) or messages == waits


def test_interleaved_stages_without_overlap_exchange_what_a_forward_and_a_backward_made() -> None:
    """Megatron-LM's `send_forward_backward_recv_forward_backward`, and warm-up and cool-down one pass at a time."""
    second = issued(("interleaved", 4, 8, 2), overlap=False, connect=False)[1]
    exchanged: list[str] = []
    open_ = False
    for line in second:
        if isinstance(line, Message):
            sender, _, channel = line.channel
            word = ("f" if channel == 0 else "b") if sender == 1 else ("F" if channel == 0 else "B")
            exchanged[-1:] = [exchanged[-1] + word] if open_ else [*exchanged[-1:], word]
            open_ = True
        elif isinstance(line, Compute):
            open_ = False
    # 2 (p - 1 - 1) + (v - 1) p = 8 of 16 forwards come before turns are taken.  Small: sent; large: received.
    assert ["".join(sorted(batch)) for batch in exchanged] == [
        "F", *["Ff"] * 7, "BFf", *["BFbf"] * 7, "Bbf", *["Bb"] * 7, "b"
    ]  # fmt: skip


def test_one_micro_batch_hangs_on_channels_that_are_connected_in_the_step() -> None:
    """The hosts of both ends meet at the first message, and each stage would post a receive before its send."""
    one = {(schedule, p, m, v) for schedule, p, m, v in SMALL if schedule != "interleaved" and m == 1}
    assert that_hang(SMALL, connect=False) == one


def test_a_step_uses_the_channels_that_were_connected() -> None:
    for case in SMALL:
        for connected, all_of_it in zip(starts(layout_of(case)), issued(case), strict=True):
            step = all_of_it[len(connected) :]
            assert all_of_it[: len(connected)] == connected
            assert {line.channel for line in step if isinstance(line, Message)} == {
                line.channel for line in connected if isinstance(line, Message)
            }


@pytest.mark.parametrize("layout", WITH_PIPELINES, ids=str)
def test_the_groups_of_a_layout_are_connected_in_one_order(layout: Layout) -> None:
    """No rank waits for one that waits for it, and all ranks of a communicator meet."""
    found = starts(layout)
    assert not stuck(found)
    met = {line.ranks for program in found for line in program if isinstance(line, Meet)}
    axes = {ranks for axis in ("dp", "cp", "tp", "pp") for ranks in groups(layout, axis) if len(ranks) > 1}
    ends = {(ranks[0], ranks[-1]) for ranks in groups(layout, "pp")}
    assert met == axes | ends | {tuple(range(layout.world))}


def test_activations_and_gradients_cannot_share_a_communicator() -> None:
    assert that_hang(SMALL, communicator=lambda channel: frozenset(channel[:2])) != set()
