"""The allocator model beside the allocator: the same allocations on a GPU give the same bytes, action by action."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from repro.simulate.memory.allocator import CachingAllocator, OutOfMemory
from repro.simulate.memory.pools import MIB, SMALL_BUFFER, SMALL_SIZE, round_up

Action = tuple[int, int] | tuple[int]

CASES = {
    "plain": ({}, None),
    "expandable": ({"expandable": True}, None),
    "limit": ({}, 1001 * MIB),
}
"""Options and limit.  Segments are multiples of 2 MiB, so an odd limit does not hang on how torch rounds it."""


def decided_by_address(allocator: CachingAllocator, size: int) -> bool:
    """Whether several free blocks of one size in different segments fit `size` best.

    The driver's addresses decide between them, and the model does not know those.
    """
    fitting: Counter[int] = Counter()
    for blocks in allocator.segments():
        small = sum(block.size for block in blocks) == SMALL_BUFFER
        free = {block.size for block in blocks if block.id is None}
        if small == (size <= SMALL_SIZE):
            fitting.update(span for span in free if span >= round_up(size))
    return bool(fitting) and fitting[min(fitting)] > 1


def draw(allocator: CachingAllocator, expandable: bool, count: int) -> tuple[list[Action], list[list[int]]]:
    """Random actions, and what the model says after each: allocated, reserved, retries, out of memory."""
    source = random.Random(17)
    actions: list[Action] = []
    expected: list[list[int]] = []
    live: list[int] = []
    while len(actions) < count:
        full = False
        if live and source.random() < (0.5 if allocator.allocated > 700 * MIB else 0.4):
            id = live.pop(source.randrange(len(live)))
            allocator.free(id)
            actions.append((id,))
        else:
            id, size = len(actions), int(2 ** source.uniform(4, 27.5))
            if not expandable and decided_by_address(allocator, size):
                continue
            try:
                allocator.malloc(id, size)
                live.append(id)
            except OutOfMemory:
                full = True
            actions.append((id, size))
        expected.append([allocator.allocated, allocator.reserved, allocator.retries, full])
    return actions, expected


def environment(options: dict[str, int]) -> dict[str, str]:
    """This process's environment with the options as torch reads them, and no others."""
    parts = []
    if "expandable" in options:
        parts.append("expandable_segments:True")
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | ({names[0]: ",".join(parts)} if parts else {})


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: no allocator to compare the model with"
)
@pytest.mark.parametrize("case", CASES)
def test_the_device_agrees_after_every_action(case: str) -> None:
    options, limit = CASES[case]
    fraction = None
    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        fraction = limit / total
        limit = int(fraction * total)
    actions, expected = draw(CachingAllocator(limit, **options), "expandable" in options, 600)
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("on_cuda.py")],
        input=json.dumps({"fraction": fraction, "actions": actions}),
        env=environment(options),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == expected


@pytest.mark.parametrize("case", CASES)
def test_the_random_actions_meet_what_they_are_for(case: str) -> None:
    """On any machine: the sequences use both pools, split and join, and meet the limit where there is one."""
    options, limit = CASES[case]
    allocator = CachingAllocator(limit, **options)
    actions, expected = draw(allocator, "expandable" in options, 600)
    assert {len(action) for action in actions} == {1, 2}
    assert any(row[1] > row[0] for row in expected)
    assert (allocator.retries > 0) == (limit is not None)
    assert max(map(len, allocator.segments())) > 3
