"""When everything in a step happens: one compute stream and one stream a group on every pipeline stage.

Replicas and tp ranks do the same at the same time, so a stage stands for all of its ranks.  A collective
begins when its stage has come to it, when the one before it on its group's stream is over, and, if its group
crosses stages, when they have all come to it; a message between stages begins when it has been sent and its
receive has been posted.  Two steps are scheduled and the second is reported, since a step begins while
parameters of the one before it are still being gathered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from repro.config import Layout
from repro.parallel.boundary import Boundary, waits_for_sends
from repro.parallel.schedule import FORWARD, build, needs
from repro.simulate.program import Await, Block, Issue, Item, Program, Send

BUBBLE, TRANSFER = "bubble", "send between stages (pp)"
ACROSS = ("world", "pp", "embedding")
"""Groups whose members are on different stages."""


class Transfers(Protocol):
    """What messages between stages cost; see :class:`repro.simulate.collectives.Network`."""

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        """Of ``payload`` bytes a rank."""


@dataclass(frozen=True)
class Span:
    """Something that a stream was busy with."""

    stage: int
    stream: str
    """``compute``, or a group's name."""
    name: str
    start: float
    seconds: float


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
    end: float = 0.0


@dataclass
class Timeline:
    """A scheduled step."""

    seconds: float
    stages: list[StageTime]
    spans: list[Span]
    unmatched: int
    """Waits for what was never issued; 0 unless something is wrong."""


Key = tuple[int, int, int, int]
"""Sender, receiver, channel, number of the message."""


class _Stage:
    """One stage's streams."""

    def __init__(self, schedule: _Schedule, stage: int, program: Program):
        self.all, self.stage, self.program = schedule, stage, program
        self.now = 0.0
        self.streams: dict[str, float] = defaultdict(float)
        self.under_way: dict[tuple[object, ...], deque[tuple[float, Issue] | tuple[object, Issue]]] = (
            defaultdict(deque)
        )
        self.sent: dict[tuple[int, int], deque[Key]] = defaultdict(deque)
        self.posted: deque[Key] = deque()
        self.counts: dict[tuple[str, int, int], int] = defaultdict(int)
        self.time = StageTime()
        self.recording = False

    def steps(self, steps: int) -> Generator[object, None, None]:
        """Run ``steps`` steps; yields what it waits for until that is known."""
        for step in range(steps):
            self.time = StageTime()
            self.recording = self.all.record and step == steps - 1
            yield from self._step()
            self.time.end = self.now
            self.all.finished[self.stage].append(self.time)

    def _step(self) -> Generator[object, None, None]:
        actions = self.all.schedule[self.stage]
        self._post(0)
        for position, action in enumerate(actions):
            if self._source(position) is not None:
                yield from self._receive()
            self._post(position + 1)
            name = f"{'forward' if action.kind == FORWARD else 'backward'} {action.micro_batch}"
            yield from self._run(self.program.of(action), name)
        for under_way in self.sent.values():
            while under_way:
                yield from self._sent(under_way.popleft())
        yield from self._run(self.program.tail, "optimizer")

    def _source(self, position: int) -> int | None:
        """The stage that sends the input of the action at ``position``."""
        actions, layout = self.all.schedule[self.stage], self.all.layout
        if position >= len(actions):
            return None
        needed = needs(actions[position], self.stage, layout.pp, layout.chunks)
        return None if needed is None or needed[0] == self.stage else needed[0]

    def _post(self, position: int) -> None:
        source = self._source(position)
        if source is None:
            return
        channel = Boundary.channel(self.all.schedule[self.stage][position].kind)
        key = (source, self.stage, channel, self._number("receive", source, channel))
        self.posted.append(key)
        self.all.post(key, self.now)

    def _number(self, direction: str, peer: int, channel: int) -> int:
        self.counts[direction, peer, channel] += 1
        return self.counts[direction, peer, channel]

    def _receive(self) -> Generator[object, None, None]:
        key = self.posted.popleft()
        while key not in self.all.arrivals:
            yield key
        start, end = self.all.arrivals[key]
        self.time.communication[TRANSFER] += end - start
        self._transferred(start, end)

    def _sent(self, key: Key) -> Generator[object, None, None]:
        while key not in self.all.arrivals:
            yield key
        self._transferred(*self.all.arrivals[key])

    def _transferred(self, start: float, end: float) -> None:
        """Wait for a message: until it starts it is the other stage that is waited for."""
        if end <= self.now:
            return
        waited = max(0.0, start - self.now)
        self.time.bubble += waited
        self.time.exposed[TRANSFER] += end - self.now - waited
        self._record("compute", "waiting for a stage", self.now, end - self.now)
        self.now = end

    def _run(self, items: Sequence[Item], name: str) -> Generator[object, None, None]:
        for item in items:
            if isinstance(item, Block):
                self._compute(item, name)
            elif isinstance(item, Issue):
                self._issue(item)
            elif isinstance(item, Await):
                yield from self._await(item)
            else:
                yield from self._send(item)

    def _compute(self, block: Block, name: str) -> None:
        seconds = block.seconds
        if self.all.overlap_cost and self.streams:
            # Communication that runs beside it takes some of the cores.
            beside = max(0.0, max(self.streams.values()) - self.now)
            slowed = (
                min(seconds / (1 - self.all.overlap_cost), beside) if self.all.overlap_cost < 1 else beside
            )
            seconds += slowed * self.all.overlap_cost
        busy, total = self.time.busy, self.time.communication
        for kind, part in block.parts:
            if kind in _BUSY:
                busy[kind] += part
            else:
                total[kind] += part
                self.time.exposed[kind] += part
        if seconds > block.seconds:
            busy["overlap"] += seconds - block.seconds
        self._record("compute", name, self.now, seconds)
        self.now += seconds

    def _issue(self, item: Issue) -> None:
        self.time.communication[item.label] += item.seconds
        ready = max(self.now, self.streams[item.group])
        if item.group in ACROSS and self.all.layout.pp > 1:
            meeting = self.all.meet(item, self.stage, ready)
            self.under_way[item.key].append((meeting, item))
            return
        end = ready + item.seconds
        self.streams[item.group] = end
        self._record(item.group, item.label, ready, item.seconds)
        self.under_way[item.key].append((end, item))

    def _await(self, item: Await) -> Generator[object, None, None]:
        under_way = self.under_way[item.key]
        if not under_way:
            self.all.unmatched += len(self.all.finished[self.stage]) > 0
            return
        end, issue = under_way.popleft()
        if isinstance(end, _Meeting):
            while end.end is None:
                yield end
            end = end.end
            self.streams[issue.group] = max(self.streams[issue.group], end)
        assert isinstance(end, float)
        if end > self.now:
            exposed = min(end - self.now, issue.seconds) if issue.group in ACROSS else end - self.now
            self.time.exposed[issue.label] += exposed
            self.time.bubble += end - self.now - exposed
            self.now = end

    def _send(self, item: Send) -> Generator[object, None, None]:
        to = (self.stage + item.offset) % self.all.layout.pp
        under_way = self.sent[to, item.channel]
        limit = Boundary.UNDER_WAY
        while len(under_way) >= limit:
            yield from self._sent(under_way.popleft())
        key = (self.stage, to, item.channel, self._number("send", to, item.channel))
        seconds = self.all.network.send_seconds(item.payload, from_stage=self.stage, to_stage=to)
        self.time.communication[TRANSFER] += seconds
        self.all.send(key, self.now, seconds)
        under_way.append(key)
        if self.all.blocking:
            yield from self._sent(under_way.popleft())

    def _record(self, stream: str, name: str, start: float, seconds: float) -> None:
        if self.recording and seconds > 0:
            self.all.spans.append(Span(self.stage, stream, name, start, seconds))


class _Meeting:
    """A collective of several stages: it begins when they have all come to it."""

    def __init__(self) -> None:
        self.ready: dict[int, float] = {}
        self.end: float | None = None


_BUSY = frozenset(("matmul", "attention", "elementwise", "optimizer", "host"))


class _Schedule:
    """All stages, and what is between them."""

    def __init__(
        self,
        layout: Layout,
        programs: Sequence[Program],
        network: Transfers,
        overlap_cost: float,
        record: bool,
    ):
        self.layout, self.network, self.overlap_cost, self.record = layout, network, overlap_cost, record
        self.schedule = build(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
        self.blocking = waits_for_sends(layout)
        self.spans: list[Span] = []
        self.arrivals: dict[Key, tuple[float, float]] = {}
        self.finished: list[list[StageTime]] = [[] for _ in programs]
        self.unmatched = 0
        self._posts: dict[Key, float] = {}
        self._sends: dict[Key, tuple[float, float]] = {}
        self._free: dict[tuple[int, int, int], float] = defaultdict(float)
        self._meetings: dict[tuple[object, ...], deque[_Meeting]] = defaultdict(deque)
        self._members = {
            group: {stage for stage, program in enumerate(programs) if _uses(program, group)}
            for group in ACROSS
        }
        self.woken: list[object] = []
        self.stages = [_Stage(self, stage, program) for stage, program in enumerate(programs)]

    def run(self) -> None:
        """Two steps of all stages."""
        waiting: dict[object, list[Generator[object, None, None]]] = defaultdict(list)
        ready = [stage.steps(2) for stage in self.stages]
        while ready:
            stage = ready.pop()
            for wanted in stage:
                waiting[wanted].append(stage)
                break
            for known in self.woken:
                ready.extend(waiting.pop(known, ()))
            self.woken.clear()
        assert not any(waiting.values()), "stages wait for each other for ever"

    def post(self, key: Key, now: float) -> None:
        """A receive is posted."""
        self._posts[key] = now
        self._match(key)

    def send(self, key: Key, now: float, seconds: float) -> None:
        """A message is sent."""
        self._sends[key] = (now, seconds)
        self._match(key)

    def _match(self, key: Key) -> None:
        if key in self._posts and key in self._sends:
            now, seconds = self._sends.pop(key)
            start = max(now, self._posts.pop(key), self._free[key[:3]])
            self._free[key[:3]] = start + seconds
            self.arrivals[key] = (start, start + seconds)
            self.woken.append(key)

    def meet(self, item: Issue, stage: int, ready: float) -> _Meeting:
        """``stage`` has come to a collective of several stages."""
        open_ = self._meetings[item.group, item.label]
        meeting = next((m for m in open_ if stage not in m.ready), None)
        if meeting is None:
            meeting = _Meeting()
            open_.append(meeting)
        meeting.ready[stage] = ready
        if len(meeting.ready) == len(self._members[item.group]):
            meeting.end = max(meeting.ready.values()) + item.seconds
            open_.remove(meeting)
            self.woken.append(meeting)
        return meeting


def _uses(program: Program, group: str) -> bool:
    items = (item for piece in (*program.segments.values(), program.tail) for item in piece)
    return any(isinstance(item, Issue) and item.group == group for item in items)


def schedule(
    layout: Layout,
    programs: Sequence[Program],
    network: Transfers,
    *,
    overlap_cost: float = 0.0,
    record: bool = False,
) -> Timeline:
    """Schedule a step of ``layout`` whose stage s runs ``programs[s]``."""
    everything = _Schedule(layout, programs, network, overlap_cost, record)
    everything.run()
    first, second = zip(*everything.finished, strict=True)
    seconds = max(stage.end for stage in second) - max(stage.end for stage in first)
    return Timeline(seconds, list(second), everything.spans, everything.unmatched)
