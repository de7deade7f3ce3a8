"""When everything in a step happens: all pipeline stages, the messages between them and where they meet.

A collective whose group crosses stages begins when they have all come to it; a message between stages begins
when it has been sent and its receive has been posted.

A step begins while parameters of the one before it are still being gathered, and a stage may begin it before another
does.  Both follow from how that one ended: all ranks agree on the gradients' norm, and update after it.  So what comes
after the last backward pass is scheduled once before the step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from repro.config import Layout
from repro.parallel.pipeline.schedule import Action, build
from repro.simulate.time.account import StageTime
from repro.simulate.time.cores import Cores, CoreWork
from repro.simulate.time.lanes import later, latest
from repro.simulate.time.program import Issue, StageProgram
from repro.simulate.time.stage import ACROSS, Key, Meeting, Span, StageStreams, Steps


class Transfers(Protocol):
    """What messages between stages cost; see `repro.simulate.time.network.Network`."""

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Of `payload` bytes a rank."""


@dataclass
class Timeline:
    """A scheduled step."""

    step_s: float
    """Seconds of the step, predicted."""
    stages: list[StageTime]
    spans: list[Span]
    unmatched: int
    """Waits for what was never issued; 0 unless something is wrong."""


class _Schedule:
    """All stages, and what is between them."""

    def __init__(
        self,
        layout: Layout,
        programs: Sequence[StageProgram],
        network: Transfers,
        overlap_cost: float,
        ranks_per_core: float,
        record: bool,
        account: type[StageTime],
    ):
        self.layout, self.network, self.overlap_cost = layout, network, overlap_cost
        self.account = account
        self.ranks_per_core = ranks_per_core if layout.pp > 1 else 1.0
        self.schedule = build(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
        self._arrivals: dict[Key, tuple[float, float]] = {}
        self._asked: set[Key] = set()
        """Messages that one of their two ends knows to have arrived."""
        self._posts: dict[Key, float] = {}
        self._sends: dict[Key, tuple[float, float]] = {}
        self._free: dict[tuple[int, int, int], float] = defaultdict(float)
        self._meetings: dict[tuple[object, ...], deque[Meeting]] = defaultdict(deque)
        used = {id(program): _groups(program) for program in programs}
        self._members = {
            group: {stage for stage, program in enumerate(programs) if group in used[id(program)]}
            for group in ACROSS
        }
        self.woken: list[object] = []
        self.stretches: dict[int, Steps] = {}
        self.stages = [
            StageStreams(self, stage, program, record=record) for stage, program in enumerate(programs)
        ]

    def run(self) -> None:
        """The step of all stages."""
        waiting: dict[object, list[Generator[object, None, None]]] = defaultdict(list)
        ready = [stage.run() for stage in self.stages]
        cores = Cores(self.ranks_per_core, self.layout.pp)
        while ready or cores.works:
            if ready:
                stage = ready.pop()
                for wanted in stage:
                    if isinstance(wanted, CoreWork):
                        cores.add(wanted)
                    waiting[wanted].append(stage)
                    break
            else:
                self.woken.extend(cores.advance())
            for known in self.woken:
                ready.extend(waiting.pop(known, ()))
            self.woken.clear()
        assert not any(waiting.values()), "stages wait for each other for ever"

    def actions(self, stage: int) -> Sequence[Action]:
        """Of a step of `stage`, in order."""
        return self.schedule[stage]

    def post(self, key: Key, now: float) -> None:
        """A receive is posted."""
        self._posts[key] = now
        self._match(key)

    def seconds(self, key: Key, payload: int) -> float:
        """Of a message of `payload` bytes a rank."""
        return self.network.send_seconds(payload, from_stage=key[0], to_stage=key[1])

    def send(self, key: Key, seconds: float, now: float) -> None:
        """A message is sent that takes `seconds`."""
        self._sends[key] = (now, seconds)
        self._match(key)

    def _match(self, key: Key) -> None:
        if key in self._posts and key in self._sends:
            now, seconds = self._sends.pop(key)
            start = later(later(now, self._posts.pop(key)), self._free[key[:3]])
            self._free[key[:3]] = start + seconds
            self._arrivals[key] = (start, start + seconds)
            self.woken.append(key)

    def has_arrived(self, key: Key) -> bool:
        """Whether it is known when a message arrives."""
        return key in self._arrivals

    def arrival(self, key: Key) -> tuple[float, float]:
        """When it began to arrive, and when it was there; told to each of its two ends once."""
        if key in self._asked:
            self._asked.remove(key)
            return self._arrivals.pop(key)
        self._asked.add(key)
        return self._arrivals[key]

    def meet(self, item: Issue, stage: int, ready: float) -> Meeting:
        """`stage` has come to a collective of several stages."""
        open_ = self._meetings[item.group, item.label]
        meeting = next((m for m in open_ if stage not in m.ready), None)
        if meeting is None:
            meeting = Meeting()
            open_.append(meeting)
        meeting.ready[stage] = ready
        if len(meeting.ready) == len(self._members[item.group]):
            meeting.end = latest(meeting.ready.values()) + item.seconds
            open_.remove(meeting)
            self.woken.append(meeting)
        return meeting


def _groups(program: StageProgram) -> set[str]:
    """Of its collectives."""
    pieces = {id(piece): piece for piece in (*program.segments.values(), program.tail)}
    return {item.group for piece in pieces.values() for item in piece if isinstance(item, Issue)}


def schedule(
    layout: Layout,
    programs: Sequence[StageProgram],
    network: Transfers,
    *,
    overlap_cost: float = 0.0,
    ranks_per_core: float = 1.0,
    record: bool = False,
    account: type[StageTime] = StageTime,
) -> Timeline:
    """Schedule a step of `layout` whose stage s runs `programs[s]`.

    `ranks_per_core`: ranks for each core that they shared when operators were measured, all of them at once.
    `account`: `OnlyTheEnd` for the seconds of the step and nothing else.
    """
    everything = _Schedule(layout, programs, network, overlap_cost, ranks_per_core, record, account)
    everything.run()
    stages = everything.stages
    step_s = latest(stage.now for stage in stages) - latest(stage.began for stage in stages)
    spans = [span for stage in stages for span in stage.spans]
    return Timeline(step_s, [stage.time for stage in stages], spans, sum(stage.unmatched for stage in stages))
