"""Stage 3: ranks that gather different units are stopped before anyone computes with mixed-up parameters.

Where data decide which modules a rank uses, one rank's shard of a block could meet another rank's of another
block.  Each unit's messages have a channel of their own (gloo; NCCL would wait), so every gather of a forward
pass sends the unit's number along, and the pass ends with a digest of its uses, on which the schedule of the
backward pass depends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from repro.parallel.comm import Group, Work


class SameUnits:
    """Compares integers over a group of which the host can read messages at once (gloo)."""

    def __init__(self, group: Group):
        self.group = group
        self._end = Work()

    def announce(self, number: int) -> Work:
        """Send `number`; waiting raises `RuntimeError` unless all ranks have sent the same."""
        if self.group.size == 1:
            return Work()
        mine = torch.tensor([number])
        all_ranks = mine.repeat(self.group.size)
        work = self.group.all_gather(all_ranks, mine, purpose="agreement")

        def compare() -> None:
            work.wait()
            if all_ranks.tolist() != [number] * self.group.size:
                raise RuntimeError(DIFFERENT)

        return Work(finish=compare)

    def union(self, marks: Sequence[bool]) -> list[bool]:
        """Of each mark whether any rank has set it; of the last 60 (more count as set)."""
        if self.group.size == 1:
            return list(marks)
        asked = marks[-60:]
        mine = torch.tensor([MARKS | sum(1 << i for i, mark in enumerate(asked) if mark)])
        all_ranks = mine.repeat(self.group.size)
        self.group.all_gather(all_ranks, mine, purpose="agreement").wait()
        if not all(number & MARKS and number > 0 for number in all_ranks.tolist()):
            raise RuntimeError(DIFFERENT)
        found = [any(number >> i & 1 for number in all_ranks.tolist()) for i in range(len(asked))]
        return [True] * (len(marks) - len(asked)) + found

    def end(self, units: Sequence[int], gradients: bool) -> None:
        """A forward pass that used these units is over; `wait` says whether all ranks' were alike."""
        # Negative, as no unit's number is and no marks are.  Of integers, so the same in every process.
        self._end = self.announce(-1 - abs(hash((gradients, *units))))

    def wait(self) -> None:
        """Raise `RuntimeError` unless the last forward passes of all ranks were alike."""
        self._end.wait()


MARKS = 1 << 60
"""Says of a message that the bits below are marks."""

DIFFERENT = (
    "under zero = 3 all ranks must use the same modules in every pass, and make as many passes with gradients and "
    "without: these ranks do not (batches of evaluation, or experts chosen by data); run every module on every rank, "
    "on no data if need be, or use zero = 2"
)
