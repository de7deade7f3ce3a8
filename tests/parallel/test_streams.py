"""Tests that the messages of pipeline schedules do not deadlock with NCCL's order of operations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest

from repro.config import Layout
from repro.parallel.mesh import groups
from tests.parallel import streams
from tests.parallel.streams import Compute, Message, Program, Rendezvous, Wait
from tests.parallel.test_parity import name_of

Case = tuple[str, int, int, int]
"""Schedule, p, m and v."""


def cases(max_stages: int, max_micro_batches: int) -> list[Case]:
    return [
        (schedule, p, m, v)
        for schedule, chunks in (("gpipe", (1,)), ("1f1b", (1,)), ("interleaved", (2, 3)))
        for p in range(2, max_stages + 1)
        for m in range(1, max_micro_batches + 1)
        for v in chunks
        if schedule != "interleaved" or m % p == 0
    ]


SMALL = cases(4, 5)


def layout_of(case: Case) -> Layout:
    schedule, p, m, v = case
    return Layout(pp=p, global_batch=m, schedule=schedule, chunks=v)


@cache
def programs(case: Case, overlap: bool = True, connect: bool = True) -> list[Program]:
    return streams.step_programs(replace(layout_of(case), overlap=overlap), connect=connect)


def deadlocks(tried: list[Case], overlap: bool = True, connect: bool = True, **rules: Any) -> set[Case]:
    return {case for case in tried if streams.deadlocked_ranks(programs(case, overlap, connect), **rules)}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "tried", [SMALL, pytest.param(cases(8, 16), marks=pytest.mark.slow)], ids=["p4-m5", "p8-m16"]
)
def test_only_interleaved_schedules_with_blocking_launches_deadlock(tried: list[Case], overlap: bool) -> None:
    """If every launch waits for an idle device, interleaved stages with overlap and m > p deadlock."""
    assert not deadlocks(tried, overlap)
    assert not deadlocks(tried, overlap, blocking="first")
    assert not deadlocks(tried, overlap, blocking="first", one_queue=True)
    expected = {case for case in tried if overlap and case[0] == "interleaved" and case[2] > case[1]}
    assert deadlocks(tried, overlap, blocking="always") == expected


def test_without_overlap_launches_follow_waits_for_all_messages() -> None:
    for stage in chain.from_iterable(programs(case, overlap=False, connect=False) for case in SMALL):
        messages = waits = 0
        for operation in stage:
            messages += isinstance(operation, Message)
            waits += isinstance(operation, Wait)
            assert not isinstance(operation, Compute) or messages == waits


def test_interleaved_stages_without_overlap_exchange_messages_in_pairs() -> None:
    """Megatron-LM's function is `send_forward_backward_recv_forward_backward`; warm-up exchanges one pass at a time."""
    second = programs(("interleaved", 4, 8, 2), overlap=False, connect=False)[1]
    exchanged: list[str] = []
    is_exchanging = False
    for operation in second:
        if isinstance(operation, Message):
            sender, _, channel = operation.channel
            letter = ("f" if channel == 0 else "b") if sender == 1 else ("F" if channel == 0 else "B")
            exchanged[-1:] = [exchanged[-1] + letter] if is_exchanging else [*exchanged[-1:], letter]
            is_exchanging = True
        elif isinstance(operation, Compute):
            is_exchanging = False
    # Warm-up has 2 (p - 1 - 1) + (v - 1) p = 8 of 16 forward passes. Lower case: sent; upper case: received.
    assert ["".join(sorted(batch)) for batch in exchanged] == [
        "F", *["Ff"] * 7, "BFf", *["BFbf"] * 7, "Bbf", *["Bb"] * 7, "b"
    ]  # fmt: skip


def test_one_micro_batch_deadlocks_without_connected_channels() -> None:
    """Both hosts of a channel wait for each other at its first message. Each stage posts a receive before its send."""
    expected = {(schedule, p, m, v) for schedule, p, m, v in SMALL if schedule != "interleaved" and m == 1}
    assert deadlocks(SMALL, connect=False) == expected


def test_a_step_uses_exactly_the_connected_channels() -> None:
    for case in SMALL:
        for connected, program in zip(streams.connect_programs(layout_of(case)), programs(case), strict=True):
            step = program[len(connected) :]
            assert program[: len(connected)] == connected
            assert {operation.channel for operation in step if isinstance(operation, Message)} == {
                operation.channel for operation in connected if isinstance(operation, Message)
            }


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=2, global_batch=4, order="pp-dp-tp"),
        Layout(pp=2, dp=2, global_batch=4, schedule="interleaved", chunks=2),
        Layout(pp=3, tp=2, global_batch=3, schedule="interleaved", chunks=2, order="pp-dp-tp"),
        Layout(pp=2, dp=2, cp=2, global_batch=4, schedule="interleaved", chunks=2, order="pp-dp-tp"),
        Layout(pp=3, dp=2, tp=2, global_batch=6, order="pp-dp-tp"),
        Layout(pp=4, dp=2, tp=2, global_batch=8),
    ],
    ids=name_of,
)
def test_connecting_the_groups_of_a_layout_does_not_deadlock(layout: Layout) -> None:
    """All ranks of each communicator connect: groups along the axes, embedding groups, and all ranks."""
    connected = streams.connect_programs(layout)
    assert not streams.deadlocked_ranks(connected)
    operations = [operation for program in connected for operation in program]
    met = {operation.ranks for operation in operations if isinstance(operation, Rendezvous)}
    axes = {ranks for axis in ("dp", "cp", "tp", "pp") for ranks in groups(layout, axis) if len(ranks) > 1}
    ends = {(ranks[0], ranks[-1]) for ranks in groups(layout, "pp")}
    assert met == axes | ends | {tuple(range(layout.world))}


def test_activations_and_gradients_deadlock_on_a_shared_communicator() -> None:
    assert deadlocks(SMALL, communicator=lambda channel: frozenset(channel[:2])) != set()
