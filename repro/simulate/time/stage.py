"""Simulation of one pipeline stage: its compute stream, and one concurrent stream of collectives per process group.

All ranks of a stage do the same at the same time. A collective begins when its stage has reached it and the preceding
collective of its group has ended. `CrossStageState` connects the stages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Generator, Sequence

from repro.parallel.pipeline.schedule import FORWARD
from repro.simulate.time.breakdown import STAGE_SEND, Span, StageTime
from repro.simulate.time.cross_stage import (
    CoreWork,
    CrossStageCollective,
    CrossStageState,
    StageItems,
    UndelayedRun,
)
from repro.simulate.time.device import first_lane, in_any_lane, maximum, minimum
from repro.simulate.time.program import (
    COMPUTE,
    GROUPS_ACROSS_STAGES,
    Await,
    Issue,
    Item,
    OperatorBlock,
    StageProgram,
    split_into_runs,
)
from repro.simulate.time.step_order import DEPART, FINISH, START

UPDATE = "update"
"""Name of the phase after the last backward pass: remaining gradient reductions, norm, optimizer, parameter gathers."""


class StageStreams:
    """Compute stream and collective streams of one pipeline stage."""

    def __init__(self, peers: CrossStageState, stage: int, program: StageProgram, *, record: bool):
        """`record`: store each busy interval of each stream of the stage in the list `spans`."""
        self.all, self.stage, self.program, self.record = peers, stage, program, record
        self.action = 0
        """Position in the schedule of the action (a forward or backward pass) that the stage runs."""
        self.has_sent = False
        """Whether the current action has exchanged its messages with other stages."""
        self.now = 0.0
        self.streams: dict[str, float] = defaultdict(float)
        """End in seconds of the last collective of each process group."""
        self.latest = 0.0
        """Latest end in seconds of any collective of this stage."""
        self.under_way: dict[tuple[object, ...], deque[tuple[float | CrossStageCollective, Issue]]] = (
            defaultdict(deque)
        )
        self.time = StageTime()
        self.recording = False
        self.began = 0.0
        """Start of the step in seconds, which is the end of the preceding step."""
        self.phase_began = 0.0
        """Start in seconds of the current forward or backward pass, or of the update."""
        self.spans: list[Span] = []
        self.unmatched = 0
        """Number of waits for collectives that were never issued."""
        self.tail = self.prepared(program.tail)

    def begin(self) -> Generator[object, None, None]:
        """Run the preceding step's update, whose collectives may end in this step. Yield unfinished collectives."""
        yield from self.run_items(self.tail, "optimizer")
        self.time, self.unmatched, self.recording = StageTime(), 0, self.record
        self.began = self.phase_began = self.now

    def run_events(self) -> Generator[object, None, None]:
        """Run all forward and backward passes item by item. Yield each message or collective whose end is unknown."""
        order, last = self.all.order, self.all.layout.accumulation - 1
        for message in order.first[self.stage]:
            self._stamp(message)
        for position, action in enumerate(order.schedule[self.stage]):
            self.action, self.has_sent = position, False
            yield from self._step(START)
            name = f"{'forward' if action.kind == FORWARD else 'backward'} {action.micro_batch}"
            yield from self.run_items(self.prepared(self.program.items_of(action, last)), name)
            yield from self._exchange()
            self.time.phase(action.kind, self.phase_began, self.now)
            self.phase_began = self.now
        for message in order.last[self.stage]:
            yield from self._arrive(message)

    def finish(self) -> Generator[object, None, None]:
        """Run the update after the last backward pass. Yield each collective whose end is not known yet."""
        yield from self.run_items(self.tail, "optimizer")
        self.time.phase(UPDATE, self.phase_began, self.now)

    def pending_times(self) -> list[float]:
        """Return the ends of all collective streams and unfinished collectives; empty if none is later than `now`."""
        ends = [over for under_way in self.under_way.values() for over, _ in under_way]
        known = [float("nan") if isinstance(over, CrossStageCollective) else over for over in ends]
        if not known and not any(in_any_lane(end > self.now) for end in self.streams.values()):
            return []
        return [maximum(end, self.now) for end in (*self.streams.values(), *known)]

    def prepared(self, items: Sequence[Item]) -> StageItems:
        """Merge operators and collectives that no other item delays into one `UndelayedRun` with a fixed duration."""
        if id(items) not in self.all.prepared_items:
            found: StageItems = []
            for is_run, part in split_into_runs(items):
                is_timed = is_run and part and self.all.ranks_per_core == 1
                found += [self._undelayed_run(part)] if is_timed else part
            self.all.prepared_items[id(items)] = found
        return self.all.prepared_items[id(items)]

    def _undelayed_run(self, items: Sequence[Item]) -> UndelayedRun:
        """Time operators and collectives as one block, on the assumption that no earlier collective is unfinished."""
        before = self.now, self.latest, self.streams, self.under_way, self.time, self.recording
        self.now, self.latest, self.time, self.recording = 0.0, 0.0, StageTime(), False
        self.streams, self.under_way = defaultdict(float), defaultdict(deque)
        for waited in self.run_items(items, ""):
            raise AssertionError(f"operators that are timed without delay wait for {waited}")
        issues = [item for item in items if isinstance(item, Issue)]
        keys, groups = frozenset(item.key for item in issues), frozenset(item.group for item in issues)
        found = UndelayedRun(items, self.now, keys, groups, self.time)
        self.now, self.latest, self.streams, self.under_way, self.time, self.recording = before
        return found

    def _alone(self, run: UndelayedRun) -> bool:
        """Return whether the fixed duration of `run` applies: no collective delays it, and no intervals are stored."""
        if self.recording:
            return False
        return self.is_idle(run.groups) and not any(self.under_way[key] for key in run.keys)

    def is_idle(self, groups: Collection[str]) -> bool:
        """Return whether no unfinished collective delays the stage's compute or further collectives of `groups`."""
        if self.all.has_overlap_cost:
            return not in_any_lane(self.latest > self.now)
        return not any(in_any_lane(self.streams[group] > self.now) for group in groups)

    def _step(self, number: int) -> Generator[object, None, None]:
        """Await and post messages at a point of the action: before compute, its send, or the next action."""
        order = self.all.order
        for message in order.awaited[number][self.stage, self.action]:
            yield from self._arrive(message)
        for message in order.stamped[number][self.stage, self.action]:
            self._stamp(message)

    def _exchange(self) -> Generator[object, None, None]:
        """Exchange the current action's messages with other pipeline stages, unless they have been exchanged."""
        if not self.has_sent:
            self.has_sent = True
            yield from self._step(DEPART)
            yield from self._step(FINISH)

    def _stamp(self, message: int) -> None:
        """Post the send or the receive of the message number `message`; a negative number stands for no message."""
        if message >= 0:
            if self.all.order.receivers[message] != self.stage:
                self.time.begun(STAGE_SEND, self.all.seconds(message))
            self.all.stamp(message, self.now)

    def _arrive(self, message: int) -> Generator[object, None, None]:
        """Wait until the message with the number `message` has arrived; a negative number stands for no message."""
        if message < 0:
            return
        while message not in self.all.arrivals:
            yield message
        start, end = self.all.arrivals[message]
        if self.all.order.receivers[message] == self.stage:
            self.time.received(start, end)
            tensors = "gradients" if self.all.order.is_backward.flat[message] else "activations"
            stream = f"pp, {tensors} of stage {message // len(self.all.order.actions[0])}"
            self._record(stream, STAGE_SEND, start, end - start)
        self.time.waited_for_message(self.now, start, end)
        self.now = maximum(self.now, end)

    def run_items(self, items: Sequence[Item | UndelayedRun], name: str) -> Generator[object, None, None]:
        """Run operators and messages of a pass or the update. Yield each message or collective whose end is unknown."""
        for item in items:
            if isinstance(item, UndelayedRun):
                if self._alone(item):
                    self.time.add(item.time, 1)
                    # Other objects may share the array `now`, which `+=` would change.
                    self.now = self.now + item.seconds
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
                assert not self.has_sent, "an action of a pipeline schedule sends at most one message"
                self.all.payloads[self.stage * len(self.all.order.actions[0]) + self.action] = item.payload
                yield from self._exchange()

    def _slowed(self, seconds: float) -> float:
        """Return the duration of a block of `seconds` of compute that concurrent communication slows down."""
        if not self.all.has_overlap_cost or not self.streams:
            return seconds
        concurrent = maximum(0.0, self.latest - self.now)
        return seconds + minimum(seconds * self.all.slowdown, self.all.overlap_cost * concurrent)

    def _compute(self, block: OperatorBlock, name: str, seconds: float, took: float) -> None:
        """Run a block of operators in `took` seconds. `seconds`: duration while all stages compute on shared cores."""
        self.time.computed(block, seconds, took)
        self._record(COMPUTE, name, self.now, took, block)
        self.now = self.now + took

    def _issue(self, item: Issue) -> None:
        self.time.begun(item.label, item.seconds)
        ready = maximum(self.now + item.late_s, self.streams[item.group])
        if item.group in GROUPS_ACROSS_STAGES and self.all.layout.pp > 1:
            meeting = self.all.meet(item, self.stage, ready)
            self.under_way[item.key].append((meeting, item))
            return
        self.streams[item.group] = end = ready + item.seconds
        self.latest = maximum(self.latest, end)
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
            self.latest = maximum(self.latest, over)
            self._record(issue.group, issue.label, over - issue.seconds, issue.seconds)
        self.time.waited_for(issue, self.now, over, across=issue.group in GROUPS_ACROSS_STAGES)
        self.now = maximum(self.now, over)

    def _record(self, stream: str, name: str, start: float, seconds: float, *block: OperatorBlock) -> None:
        if self.recording and first_lane(seconds) > 0:
            self.spans.append(Span(self.stage, stream, name, first_lane(start), first_lane(seconds), *block))
