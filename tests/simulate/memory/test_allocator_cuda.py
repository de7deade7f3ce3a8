"""Tests of the allocator model on a GPU: equal actions give equal allocated and reserved bytes."""

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

CASES = {"plain": (False, None), "expandable": (True, None), "limit": (False, 1001 * MIB)}
"""Expandable segments, and limit.

Segments are multiples of 2 MiB, so torch's rounding of an odd limit has no effect."""


def decided_by_address(allocator: CachingAllocator, size: int) -> bool:
    """Return whether several free blocks of one size in different segments fit `size` best.

    The driver's addresses decide between these blocks, and the model does not have these addresses.
    """
    fitting: Counter[int] = Counter()
    for blocks in allocator.segments():
        small = sum(block.size for block in blocks) == SMALL_BUFFER
        free = {block.size for block in blocks if block.id is None}
        if small == (size <= SMALL_SIZE):
            fitting.update(span for span in free if span >= round_up(size))
    return bool(fitting) and fitting[min(fitting)] > 1


def draw(allocator: CachingAllocator, expandable: bool, count: int) -> tuple[list[Action], list[list[int]]]:
    """Draw actions; return them and the model's values after each: allocated, reserved, retries, out of memory."""
    generator = random.Random(17)
    actions: list[Action] = []
    expected: list[list[int]] = []
    live: list[int] = []
    while len(actions) < count:
        out_of_memory = False
        if live and generator.random() < (0.5 if allocator.allocated > 700 * MIB else 0.4):
            id = live.pop(generator.randrange(len(live)))
            allocator.free(id)
            actions.append((id,))
        else:
            id, size = len(actions), int(2 ** generator.uniform(4, 27.5))
            if not expandable and decided_by_address(allocator, size):
                continue
            try:
                allocator.malloc(id, size)
                live.append(id)
            except OutOfMemory:
                out_of_memory = True
            actions.append((id, size))
        expected.append([allocator.allocated, allocator.reserved, allocator.retries, out_of_memory])
    return actions, expected


def environment(expandable: bool) -> dict[str, str]:
    """Return the environment of this process, with the given allocator option alone."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return inherited | ({names[0]: "expandable_segments:True"} if expandable else {})


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the model is compared with the allocator of CUDA"
)
@pytest.mark.parametrize("case", CASES)
def test_model_and_device_agree_after_every_action(case: str) -> None:
    expandable, limit = CASES[case]
    fraction = None
    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        fraction = limit / total
        limit = int(fraction * total)
    allocator = CachingAllocator(limit, expandable=expandable)
    actions, expected = draw(allocator, expandable, 600)
    assert (allocator.retries > 0) == (limit is not None), "the actions reach the limit"
    assert max(map(len, allocator.segments())) > 3, "the actions split blocks"
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("on_cuda.py")],
        input=json.dumps({"fraction": fraction, "actions": actions}),
        env=environment(expandable),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == expected
