"""What a process has freed stays its own: looked at in one of its own, since there is no way back."""

from __future__ import annotations

import subprocess
import sys

STEPS = """
import resource, sys, torch
from repro.util import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [torch.ones(size << 20, dtype=torch.uint8) for size in (40, 3, 9)]

torch.set_num_threads(1)
if "kept" in sys.argv:
    heap.keep_freed()
step()
if "kept" in sys.argv:
    heap.reserve(52 << 20, 1)
before = faults()
for _ in range(3):
    step()
print(faults() - before)
"""
PAGES = 3 * (52 << 20) // 4096


def faults_of_three_steps(*said: str) -> int:
    done = subprocess.run([sys.executable, "-c", STEPS, *said], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_what_was_freed_is_taken_again_without_a_page_fault() -> None:
    assert faults_of_three_steps("kept") < 200


def test_and_would_not_be() -> None:
    assert faults_of_three_steps() > PAGES / 2
