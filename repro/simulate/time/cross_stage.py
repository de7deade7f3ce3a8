"""State that the streams of all pipeline stages share: messages in flight, collectives across stages, and CPU cores.

A collective across stages begins when the last stage reaches it. A message begins when both stages have posted it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from repro.config import Layout
from repro.simulate.time.breakdown import StageTime
from repro.simulate.time.device import in_any_lane, maximum, maximum_of
from repro.simulate.time.program import GROUPS_ACROSS_STAGES, Issue, Item, StageProgram
from repro.simulate.time.step_order import step_order

MIN_COMPUTE_SHARE = 1e-9
"""Minimum share of a processor that remains for compute during a collective, 0 to 1."""


class CoreWork:
    """Compute work of one stage on shared CPU cores. Its `end` is None until all concurrent work is known."""

    def __init__(self, start: float, seconds: float):
        """`seconds`: duration of a stage's compute work while all stages compute on the shared CPU cores."""
        self.start, self.left = start, seconds
        self.end: float | None = None


class CrossStageCollective:
    """Collective over several pipeline stages. Its `end` is None until all of its stages have reached it."""

    def __init__(self) -> None:
        self.ready: dict[int, float] = {}
        self.end: float | None = None


@dataclass(frozen=True, eq=False)
class UndelayedRun:
    """Block of operators and collectives that takes a fixed time unless earlier, unfinished collectives delay it."""

    items: Sequence[Item]
    seconds: float
    keys: frozenset[tuple[object, ...]]
    """Keys (`Trace.keys`) of the collectives in this block of operators and collectives."""
    groups: frozenset[str]
    """Process groups of the collectives in this run of consecutive operators and collectives."""
    time: StageTime
    """Breakdown of `seconds`."""


StageItems = list[Item | UndelayedRun]
"""Operators, collectives and messages of a forward or backward pass or the optimizer, in the order of execution."""


class SharedCores:
    """The CPU cores of a machine, of which all computing stages have equal shares."""

    def __init__(self, ranks_per_core: float, stages: int):
        """`ranks_per_core`: number of ranks per core. A rank uses at most one core, even if others are free."""
        self.ranks_per_core, self.stages = ranks_per_core, stages
        self.now = 0.0
        self.works: list[CoreWork] = []

    def add(self, work: CoreWork) -> None:
        """Add the compute work of a stage, whose start is not before the current time."""
        self.works.append(work)

    def advance(self) -> list[CoreWork]:
        """Advance the current time to the next end of any stage's compute work, and return all work that ends then."""
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


class Transfers(Protocol):
    """Interface of a network model that gives the seconds of messages between pipeline stages."""

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Return the seconds of a message of `payload` bytes from each rank of one stage to its peer in another."""


class CrossStageState:
    """State that the streams of all pipeline stages share: messages in flight, collectives across stages, CPU cores."""

    def __init__(
        self,
        layout: Layout,
        programs: Sequence[StageProgram],
        network: Transfers,
        overlap_cost: float,
        ranks_per_core: float,
    ):
        self.layout, self.network, self.overlap_cost = layout, network, overlap_cost
        self.has_overlap_cost = in_any_lane(overlap_cost)
        self.slowdown = overlap_cost / maximum(1 - overlap_cost, MIN_COMPUTE_SHARE)
        """Seconds that a collective adds to each second of concurrent computation."""
        self.ranks_per_core = ranks_per_core if layout.pp > 1 else 1.0
        self.order = step_order(layout)
        self.payloads: dict[int, int] = {}
        """Bytes that each rank sends in a message between pipeline stages, by number of the message."""
        self.arrivals: dict[int, tuple[float, float]] = {}
        """Start and end in seconds of the transfer of each message between pipeline stages, by message number."""
        self._stamps: dict[int, float] = {}
        self._meetings: dict[tuple[object, ...], deque[CrossStageCollective]] = defaultdict(deque)
        used = {id(program): _groups(program) for program in programs}
        self._members = {
            group: {stage for stage, program in enumerate(programs) if group in used[id(program)]}
            for group in GROUPS_ACROSS_STAGES
        }
        self.woken: list[object] = []
        self.prepared_items: dict[int, StageItems] = {}

    def seconds(self, message: int) -> float:
        """Return the seconds of a message, or of several that two pipeline stages exchange together."""
        sender = message // len(self.order.actions[0])
        return sum(
            self.network.send_seconds(
                self.payloads[one], from_stage=sender, to_stage=int(self.order.receivers[one])
            )
            for one in self.order.together[message].tolist()
            if one >= 0
        )

    def stamp(self, message: int, now: float) -> None:
        """Record that a stage posts a send or receive at `now`; the second post of a message begins its transfer."""
        if message not in self._stamps:
            self._stamps[message] = now
            return
        start = maximum(self._stamps.pop(message), now)
        self.arrivals[message] = (start, start + self.seconds(message))
        self.woken.append(message)

    def meet(self, item: Issue, stage: int, ready: float) -> CrossStageCollective:
        """Record that `stage` reaches a collective across stages at the time `ready`, and return the collective."""
        open_ = self._meetings[item.group, item.label]
        meeting = next((m for m in open_ if stage not in m.ready), None)
        if meeting is None:
            meeting = CrossStageCollective()
            open_.append(meeting)
        meeting.ready[stage] = ready
        if len(meeting.ready) == len(self._members[item.group]):
            meeting.end = maximum_of(meeting.ready.values()) + item.seconds
            open_.remove(meeting)
            self.woken.append(meeting)
        return meeting


def _groups(program: StageProgram) -> set[str]:
    """Return the names of the process groups of all collectives in a stage's program."""
    pieces = {id(piece): piece for piece in (*program.segments.values(), program.tail)}
    return {item.group for piece in pieces.values() for item in piece if isinstance(item, Issue)}
