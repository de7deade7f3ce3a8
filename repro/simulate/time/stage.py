"""Streams of one pipeline stage: it computes, starts concurrent collectives, and waits for the results that it needs.

Replicas and tp ranks do the same at the same time, so one stage represents all of its ranks. A collective begins when
its stage has reached it and the preceding collective of its group has ended. `CrossStageState` connects the stages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from itertools import accumulate, pairwise

from repro.parallel.pipeline.boundary import Boundary, exchanges
from repro.parallel.pipeline.schedule import FORWARD, Action, batches, build_schedule, dependency_of
from repro.simulate.time.breakdown import STAGE_SEND, Span, StageTime
from repro.simulate.time.cross_stage import (
    CoreWork,
    CrossStageCollective,
    CrossStageState,
    MessageKey,
    StageItems,
    UndelayedRun,
)
from repro.simulate.time.device import first_lane, in_any_lane, maximum, maximum_of, minimum
from repro.simulate.time.program import (
    GROUPS_ACROSS_STAGES,
    Await,
    Issue,
    Item,
    OperatorBlock,
    Send,
    StageProgram,
    split_into_runs,
)

UPDATE = "update"
"""Phase after the last backward pass: remaining reductions of gradients, norm, optimizer, parameters."""
MIN_COMPUTE_SHARE = 1e-9
"""Minimum share of the processors that remains for compute."""


class StageStreams:
    """The streams of one stage."""

    def __init__(self, peers: CrossStageState, stage: int, program: StageProgram, *, record: bool):
        """`record`: store the spans of the step."""
        self.all, self.stage, self.program, self.record = peers, stage, program, record
        self.actions: Sequence[Action] = ()
        self.sources: list[int | None] = []
        """The stage that sends the input of each action."""
        self.exchanges = exchanges(peers.layout)
        self.outbox: list[Send] = []
        """Messages for the next exchange."""
        self.following: Sequence[int] | None = None
        """Positions of the actions whose inputs the next exchange receives; None if no exchange is due."""
        self.now = 0.0
        self.streams: dict[str, float] = defaultdict(float)
        self.under_way: dict[tuple[object, ...], deque[tuple[float | CrossStageCollective, Issue]]] = (
            defaultdict(deque)
        )
        self.sent: dict[tuple[int, int], deque[MessageKey]] = defaultdict(deque)
        self.posted: deque[MessageKey] = deque()
        self.counts: dict[tuple[str, int, int], int] = defaultdict(int)
        self.time = StageTime()
        self.recording = False
        self.began = 0.0
        """Start of the step, which is the end of the preceding step."""
        self.phase_began = 0.0
        """Start of the current action, or of the update."""
        self.spans: list[Span] = []
        self.unmatched = 0
        """Number of waits for collectives that were never issued."""
        self.tail = self.prepared(program.tail)

    def begin(self) -> Generator[object, None, None]:
        """Run what the preceding step leaves under way. Yield each awaited object until its time is known."""
        yield from self.run_items(self.tail, "optimizer")
        self.time, self.unmatched, self.recording = StageTime(), 0, self.record
        self.began = self.phase_began = self.now

    def run_events(self) -> Generator[object, None, None]:
        """Run all actions event by event. Yield each awaited object until its time is known."""
        layout = self.all.layout
        self.actions = build_schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)[
            self.stage
        ]
        self.sources = [self._source_of(action) for action in self.actions]
        # Without overlap, the stage exchanges messages after each batch of actions.
        ends = accumulate(map(len, batches(self.actions, layout.chunks)), initial=0)
        positions = [range(begin, end) for begin, end in pairwise(ends)]
        if self.exchanges:
            self.following = positions[0]
            yield from self._exchange()
        else:
            self._post(0)
        for batch, following in pairwise([*positions, ()]):
            for position in batch:
                action = self.actions[position]
                if not self.exchanges:
                    yield from self._receive(position)
                    self._post(position + 1)
                elif position == batch[-1]:
                    self.following = following
                name = f"{'forward' if action.kind == FORWARD else 'backward'} {action.micro_batch}"
                items = self.program.items_of(action, layout.accumulation - 1)
                yield from self.run_items(self.prepared(items), name)
                yield from self._exchange()
                self.time.phase(action.kind, self.phase_began, self.now)
                self.phase_began = self.now
        for under_way in self.sent.values():
            while under_way:
                yield from self._sent(under_way.popleft())

    def finish(self) -> Generator[object, None, None]:
        """Run the update. Yield each awaited object until its time is known."""
        yield from self.run_items(self.tail, "optimizer")
        self.time.phase(UPDATE, self.phase_began, self.now)

    def pending_times(self) -> list[float]:
        """Return the ends of all streams and collectives under way; empty if none is later than now."""
        ends = [over for under_way in self.under_way.values() for over, _ in under_way]
        known = [float("nan") if isinstance(over, CrossStageCollective) else over for over in ends]
        if not known and not any(in_any_lane(end > self.now) for end in self.streams.values()):
            return []
        return [maximum(end, self.now) for end in (*self.streams.values(), *known)]

    def prepared(self, items: Sequence[Item]) -> StageItems:
        """Return `items` with each undelayed run as one item."""
        if id(items) not in self.all.prepared_items:
            found: StageItems = []
            for whole, part in split_into_runs(items):
                alone = whole and part and self.all.ranks_per_core == 1
                found += [self._undelayed_run(part)] if alone else part
            self.all.prepared_items[id(items)] = found
        return self.all.prepared_items[id(items)]

    def _undelayed_run(self, items: Sequence[Item]) -> UndelayedRun:
        """Time `items` without unfinished collectives, and return them as a run."""
        before = self.now, self.streams, self.under_way, self.time, self.recording
        self.now, self.time, self.recording = 0.0, StageTime(), False
        self.streams, self.under_way = defaultdict(float), defaultdict(deque)
        for waited in self.run_items(items, ""):
            raise AssertionError(f"a run waits for {waited}")
        issues = [item for item in items if isinstance(item, Issue)]
        keys, groups = frozenset(item.key for item in issues), frozenset(item.group for item in issues)
        found = UndelayedRun(items, self.now, keys, groups, self.time)
        self.now, self.streams, self.under_way, self.time, self.recording = before
        return found

    def _alone(self, run: UndelayedRun) -> bool:
        """Return whether no unfinished collective delays `run` and no spans are recorded."""
        if self.recording:
            return False
        busy = self.streams if in_any_lane(self.all.overlap_cost) else run.groups
        return not any(in_any_lane(self.streams[group] > self.now) for group in busy) and not any(
            self.under_way[key] for key in run.keys
        )

    def _source_of(self, action: Action) -> int | None:
        layout = self.all.layout
        needed = dependency_of(action, self.stage, layout.pp, layout.chunks)
        return None if needed is None or needed[0] == self.stage else needed[0]

    def _post(self, position: int) -> None:
        source = self.sources[position] if position < len(self.sources) else None
        if source is None:
            return
        channel = Boundary.channel(self.actions[position].kind)
        key = (source, self.stage, channel, self._number("receive", source, channel))
        self.posted.append(key)
        self.all.post(key, self.now)

    def _number(self, direction: str, peer: int, channel: int) -> int:
        self.counts[direction, peer, channel] += 1
        return self.counts[direction, peer, channel]

    def _receive(self, position: int) -> Generator[object, None, None]:
        if self.sources[position] is None:
            return
        key = self.posted.popleft()
        while not self.all.has_arrived(key):
            yield key
        start, end = self.all.arrival(key)
        self.time.received(start, end)
        self._transferred(start, end)

    def _sent(self, key: MessageKey) -> Generator[object, None, None]:
        while not self.all.has_arrived(key):
            yield key
        self._transferred(*self.all.arrival(key))

    def _transferred(self, start: float, end: float) -> None:
        """Wait until a message has arrived."""
        self.time.waited_for_message(self.now, start, end)
        if self.recording:
            self._record("compute", "waiting for a stage", self.now, end - self.now)
        self.now = maximum(self.now, end)

    def run_items(self, items: Sequence[Item | UndelayedRun], name: str) -> Generator[object, None, None]:
        """Run the items of an action. Yield each awaited object until its time is known."""
        for item in items:
            if isinstance(item, UndelayedRun):
                if self._alone(item):
                    self.time.add(item.time, 1)
                    self.now = self.now + item.seconds  # lanes are shared, so they are not changed in place
                else:
                    yield from self.run_items(item.items, name)
            elif isinstance(item, OperatorBlock):
                seconds = self._slowed(item.seconds)
                if self.all.ranks_per_core > 1:
                    work = CoreWork(self.now, seconds)
                    while work.end is None:
                        yield work
                    self._compute(item, name, seconds, work.end - self.now)
                else:
                    self._compute(item, name, seconds, seconds)
            elif isinstance(item, Issue):
                self._issue(item)
            elif isinstance(item, Await):
                yield from self._await(item)
            else:
                yield from self._send(item)

    def _slowed(self, seconds: float) -> float:
        """Return the seconds of a block while concurrent communication uses some of the processors."""
        cost = self.all.overlap_cost
        if not in_any_lane(cost) or not self.streams:
            return seconds
        beside = maximum(0.0, maximum_of(self.streams.values()) - self.now)
        return seconds + cost * minimum(seconds / maximum(1 - cost, MIN_COMPUTE_SHARE), beside)

    def _compute(self, block: OperatorBlock, name: str, seconds: float, took: float) -> None:
        """Add `block`, which takes `seconds` while all stages compute, and `took` while fewer compute."""
        self.time.computed(block, seconds, took)
        self._record("compute", name, self.now, took)
        self.now = self.now + took

    def _issue(self, item: Issue) -> None:
        self.time.begun(item.label, item.seconds)
        ready = maximum(self.now + item.late_s, self.streams[item.group])
        if item.group in GROUPS_ACROSS_STAGES and self.all.layout.pp > 1:
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
            self.unmatched += 1
            return
        over, issue = under_way.popleft()
        if isinstance(over, CrossStageCollective):
            while over.end is None:
                yield over
            over = over.end
            self.streams[issue.group] = maximum(self.streams[issue.group], over)
        self.time.waited_for(issue, self.now, over, across=issue.group in GROUPS_ACROSS_STAGES)
        self.now = maximum(self.now, over)

    def _send(self, item: Send) -> Generator[object, None, None]:
        if self.exchanges:
            self.outbox.append(item)
            yield from self._exchange()
            return
        under_way = self.sent[self._to(item), item.channel]
        while len(under_way) >= Boundary.UNDER_WAY:
            yield from self._sent(under_way.popleft())
        key = self._addressed(item)
        under_way.append(key)
        self._begin(key, self.all.seconds(key, item.payload))

    def _exchange(self) -> Generator[object, None, None]:
        """If an exchange is due, send the outgoing messages, receive the next batch's inputs, and wait for all."""
        following, self.following = self.following, None
        if following is None:
            return
        for position in following:
            self._post(position)
        keys = [self._addressed(item) for item in self.outbox]
        seconds = sum(
            self.all.seconds(key, item.payload) for key, item in zip(keys, self.outbox, strict=True)
        )
        self.outbox.clear()
        for key in keys:
            self._begin(key, seconds)
        for key in keys:
            yield from self._sent(key)
        for position in following:
            yield from self._receive(position)

    def _begin(self, key: MessageKey, seconds: float) -> None:
        self.time.begun(STAGE_SEND, seconds)
        self.all.send(key, seconds, self.now)

    def _to(self, item: Send) -> int:
        return (self.stage + item.offset) % self.all.layout.pp

    def _addressed(self, item: Send) -> MessageKey:
        to = self._to(item)
        return (self.stage, to, item.channel, self._number("send", to, item.channel))

    def _record(self, stream: str, name: str, start: float, seconds: float) -> None:
        if self.recording and first_lane(seconds) > 0:
            self.spans.append(Span(self.stage, stream, name, first_lane(start), first_lane(seconds)))
