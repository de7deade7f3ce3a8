"""Pipeline stages whose ranks share processor cores: each computes faster while others wait.

A calibrated file of more ranks than cores holds what operators took while all ranks computed.  In the bubble of a
pipeline fewer do, and the kernel gives their share to those that go on.
"""

from __future__ import annotations


class CoreWork:
    """A block of one stage; `end` is known when it is known what else runs meanwhile."""

    def __init__(self, start: float, seconds: float):
        """`seconds`: what it takes while all stages compute."""
        self.start, self.left = start, seconds
        self.end: float | None = None


class Cores:
    """The cores of a machine, shared evenly by the stages that compute."""

    def __init__(self, ranks_per_core: float, stages: int):
        """`ranks_per_core`: ranks for each core.  A rank uses one core at most, however many are free."""
        self.ranks_per_core, self.stages = ranks_per_core, stages
        self.now = 0.0
        self.works: list[CoreWork] = []

    def add(self, work: CoreWork) -> None:
        """A stage has come to `work`, which begins now or later."""
        self.works.append(work)

    def advance(self) -> list[CoreWork]:
        """Let time pass until the first block ends; what ended then."""
        while True:
            active = [work for work in self.works if work.start <= self.now]
            later = min((work.start for work in self.works if work.start > self.now), default=float("inf"))
            if not active:
                self.now = later
                continue
            speed = min(self.ranks_per_core, self.stages / len(active))
            least = min(work.left for work in active)
            end = self.now + least / speed
            if later < end:
                for work in active:
                    work.left = max(0.0, work.left - (later - self.now) * speed)
                self.now = later
                continue
            ended = [work for work in active if work.left == least]
            for work in active:
                work.left -= least
            for work in ended:
                work.end = end
                self.works.remove(work)
            self.now = end
            return ended
