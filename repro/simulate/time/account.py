"""Where the seconds of one stage's step went, told by its streams as they go.

Whoever asks for the end of a step alone, for many systems at once, keeps no account: `OnlyTheEnd` takes what it is
told and does nothing, which leaves a fifth of the work.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from repro.simulate.time.lanes import anywhere, earlier, later
from repro.simulate.time.program import KINDS, Issue, OperatorBlock

TRANSFER = "send between stages (pp)"


@dataclass
class StageTime:
    """Where one stage's seconds of a step went."""

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The compute stream, by kind of operator."""
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """It waited for communication, by label."""
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """All communication, hidden or not, by label."""
    bubble: float = 0.0
    """It waited for another stage to compute."""
    by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """From the beginning of each forward pass, backward pass and update to its end, waits included."""

    def add(self, other: StageTime, times: int) -> None:
        """`other`, which came so many times."""
        self.bubble += times * other.bubble
        for mine, more in (
            (self.busy, other.busy),
            (self.exposed, other.exposed),
            (self.communication, other.communication),
        ):
            for name, seconds in more.items():
                mine[name] += times * seconds

    def phase(self, name: str, began: float, now: float) -> None:
        """A forward pass, a backward pass or the update is over."""
        self.by_phase[name] += now - began

    def computed(self, block: OperatorBlock, seconds: float, took: float) -> None:
        """`block`, which takes `seconds` while all stages compute, and took less where some did not."""
        part_of = 1.0 if took is seconds or not seconds else took / seconds
        for kind, part in block.parts:
            if kind in KINDS:
                self.busy[kind] += part * part_of
            else:
                self.communication[kind] += part * part_of
                self.exposed[kind] += part * part_of
        if anywhere(seconds > block.seconds):
            self.busy["overlap"] += (seconds - block.seconds) * part_of

    def begun(self, label: str, seconds: float) -> None:
        """A collective or a message that takes `seconds`."""
        self.communication[label] += seconds

    def received(self, start: float, end: float) -> None:
        """A message of another stage."""
        self.communication[TRANSFER] += end - start

    def waited_for_message(self, now: float, start: float, end: float) -> None:
        """From `now` until it has come: until it starts it is the other stage that is waited for."""
        delay, waited = later(0.0, end - now), later(0.0, start - now)
        self.bubble += waited
        self.exposed[TRANSFER] += delay - waited

    def waited_for(self, issue: Issue, now: float, end: float, *, across: bool) -> None:
        """From `now` until a collective has ended; `across`: others of its group may have come later."""
        delay = later(0.0, end - now)
        exposed = earlier(delay, issue.seconds) if across else delay
        self.exposed[issue.label] += exposed
        self.bubble += delay - exposed


class OnlyTheEnd(StageTime):
    """Nothing: when the step ended is known without."""

    def add(self, other: StageTime, times: int) -> None:
        return

    def phase(self, name: str, began: float, now: float) -> None:
        return

    def computed(self, block: OperatorBlock, seconds: float, took: float) -> None:
        return

    def begun(self, label: str, seconds: float) -> None:
        return

    def received(self, start: float, end: float) -> None:
        return

    def waited_for_message(self, now: float, start: float, end: float) -> None:
        return

    def waited_for(self, issue: Issue, now: float, end: float, *, across: bool) -> None:
        return
