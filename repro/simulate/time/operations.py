"""Operations of a step's actions in levels, which depend on the schedule alone and on no number.

A stage waits for a message, posts a receive, runs an action or sends. Operations of different stages that do not depend
on each other form a level, which `repro.simulate.time.recurrence` evaluates as a few operations on arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from repro.config import Layout
from repro.config.systems.unknowns import Lanes
from repro.parallel.pipeline.boundary import Boundary, exchanges
from repro.parallel.pipeline.schedule import Action, batches, build_schedule, dependency_of

WAIT, POST, RUN, SEND, END = "wait", "post", "run", "send", "end"
RANKS = {WAIT: (1,), END: (2, 6), POST: (3, 5), RUN: (4,), SEND: (3, 5)}
"""Places of an operation within a level; matches of messages come first."""
SHARED_RANKS = (1, 3, 5)
"""Places that several operations of a stage may share."""
MAX_SCHEDULES = 16
"""Number of schedules whose operations a process stores."""


Operation = tuple[str, int]
"""Kind, and position of an action or number of a message."""


class OperationGroup(NamedTuple):
    """Operations of one kind, in different stages or on different messages."""

    kind: str
    stages: Lanes
    """[operations]"""
    subjects: Lanes
    """[operations]"""


@dataclass
class Level:
    """Operations that do not depend on each other."""

    matches: Lanes
    """Messages whose send and receive are known, [messages]."""
    groups: list[OperationGroup]
    """In the order of the places within a level."""


@dataclass
class StepOperations:
    """Operations of a step's actions, without numbers."""

    actions: Sequence[Sequence[Action]]
    levels: list[Level]
    routes: list[tuple[int, int, int]]
    """Sender, receiver and channel of each message."""
    previous: list[int]
    """Preceding message on the route of each message; -1 for the first."""
    senders: list[int]
    """Position of the action that makes each message."""
    together: list[list[int]]
    """Messages that leave together with each message, itself included."""
    waits: list[list[list[int]]]
    """For each stage and action, the messages that the stage waits for up to the end of the action."""


def step_operations(layout: Layout) -> StepOperations:
    """Return the operations of all actions of a step."""
    return _operations(
        layout.schedule, layout.pp, layout.accumulation, layout.chunks, exchange=exchanges(layout)
    )


@lru_cache(MAX_SCHEDULES)
def _operations(
    schedule: str, stages: int, micro_batches: int, chunks: int, *, exchange: bool
) -> StepOperations:
    return _OperationBuilder(schedule, stages, micro_batches, chunks, exchange).build()


class _OperationBuilder:
    """Builder of a step's operations: the order of each stage, then the levels."""

    def __init__(self, schedule: str, stages: int, micro_batches: int, chunks: int, exchange: bool):
        self.actions = build_schedule(schedule, stages, micro_batches, chunks)
        self.exchange, self.stages, self.chunks = exchange, stages, chunks
        self.numbers: dict[tuple[tuple[int, int, int], int], int] = {}
        """Number of each message by its route and its place on the route."""
        self.sent: list[list[int]] = [[-1] * len(actions) for actions in self.actions]
        """Message that each action sends; -1: none."""
        self.received: list[list[int]] = [[-1] * len(actions) for actions in self.actions]
        self.found = StepOperations(self.actions, [], [], [], [], [], [])
        self._number_messages()

    def _number_messages(self) -> None:
        receivers = {}
        for stage, actions in enumerate(self.actions):
            for action in actions:
                needed = dependency_of(action, stage, self.stages, self.chunks)
                if needed is not None and needed[0] != stage:
                    receivers[needed] = stage
        found = self.found
        for stage, actions in enumerate(self.actions):
            counts: dict[tuple[int, int, int], int] = defaultdict(int)
            for position, action in enumerate(actions):
                to = receivers.get((stage, action))
                if to is None:
                    continue
                route = stage, to, Boundary.channel(action.kind)
                number = self.numbers[route, counts[route]] = len(found.routes)
                self.sent[stage][position] = number
                found.routes.append(route)
                found.senders.append(position)
                found.previous.append(self.numbers.get((route, counts[route] - 1), -1))
                found.together.append([number])
                counts[route] += 1
        for stage, actions in enumerate(self.actions):
            counts = defaultdict(int)
            for position, action in enumerate(actions):
                needed = dependency_of(action, stage, self.stages, self.chunks)
                if needed is not None and needed[0] != stage:
                    route = needed[0], stage, Boundary.channel(action.kind)
                    self.received[stage][position] = self.numbers[route, counts[route]]
                    counts[route] += 1

    def build(self) -> StepOperations:
        """Return the operations."""
        orders = [
            self._exchanged(stage) if self.exchange else self._overlapped(stage)
            for stage in range(self.stages)
        ]
        for order in orders:
            waits: list[list[int]] = [[]]
            for kind, subject in order:
                if kind == WAIT:
                    waits[-1].append(subject)
                elif kind == END:
                    waits.append([])
            self.found.waits.append(waits)
        self.found.levels = _levels(len(self.found.routes), orders)
        return self.found

    def _overlapped(self, stage: int) -> list[Operation]:
        """Return the operations of a stage whose messages overlap with computation."""
        found: list[Operation] = []
        sent: dict[tuple[int, int, int], list[int]] = {}

        def add(kind: str, subject: int) -> None:
            found.append((kind, subject))

        received = [*self.received[stage], -1]
        if received[0] >= 0:
            add(POST, received[0])
        for position, message in enumerate(self.sent[stage]):
            if received[position] >= 0:
                add(WAIT, received[position])
            if received[position + 1] >= 0:
                add(POST, received[position + 1])
            add(RUN, position)
            if message >= 0:
                under_way = sent.setdefault(self.found.routes[message], [])
                if len(under_way) >= Boundary.UNDER_WAY:
                    add(WAIT, under_way.pop(0))
                under_way.append(message)
                add(SEND, message)
            add(END, position)
        for under_way in sent.values():
            for message in under_way:
                add(WAIT, message)
        return found

    def _exchanged(self, stage: int) -> list[Operation]:
        """Return the operations of a stage that exchanges messages after each batch of actions."""
        found: list[Operation] = []
        batches = action_batches(self.actions[stage], self.chunks)

        def add(kind: str, subjects: Sequence[int]) -> None:
            found.extend([(kind, subject) for subject in subjects if subject >= 0])

        def inputs(batch: Sequence[int]) -> list[int]:
            return [self.received[stage][position] for position in batch]

        add(POST, inputs(batches[0]))
        add(WAIT, inputs(batches[0]))
        for batch, following in pairwise([*batches, range(0)]):
            sent = [self.sent[stage][position] for position in batch]
            together = [message for message in sent if message >= 0]
            for message in together:
                self.found.together[message] = together
            for position in batch:
                add(RUN, [position])
                if position == batch[-1]:
                    add(POST, inputs(following))
                    add(SEND, sent)
                    add(WAIT, sent)
                    add(WAIT, inputs(following))
                add(END, [position])
        return found


def _following_place(kind: str, rank: int) -> tuple[int, int]:
    """Return the number of levels to the first place for `kind` after an operation at `rank`, and its rank."""
    ranks = [one for one in RANKS[kind] if one > rank or (one == rank and rank in SHARED_RANKS)]
    return (0, ranks[0]) if ranks else (1, RANKS[kind][0])


FOLLOWING_PLACE = {(kind, rank): _following_place(kind, rank) for kind in RANKS for rank in range(7)}


def _levels(messages: int, orders: Sequence[Sequence[Operation]]) -> list[Level]:
    """Return the operations of all stages in levels, each as early as possible."""
    matches: dict[int, list[int]] = defaultdict(list)
    """Messages by level."""
    groups: dict[tuple[int, int, int, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    """Stages and subjects by level, rank, number among the waits of a stage in this place, and kind."""
    stamps, matched = [-1] * messages, [-1] * messages
    """Levels of the first of a message's post and send, and of its known end; -1: not yet."""
    at, places = [0] * len(orders), [(0, 0, 0)] * len(orders)
    held: dict[int, list[int]] = defaultdict(list)
    ready = list(range(len(orders)))
    while ready:
        stage = ready.pop()
        level, rank, slot = places[stage]
        for kind, subject in orders[stage][at[stage] :]:
            if kind == WAIT:
                if matched[subject] < 0:
                    held[subject].append(stage)
                    break
                if matched[subject] > level:
                    level, rank = matched[subject], 0
            before = level, rank
            further, rank = FOLLOWING_PLACE[kind, rank]
            level += further
            slot = slot + 1 if kind == WAIT and before == (level, rank) else 0
            stages, subjects = groups[level, rank, slot, kind]
            stages.append(stage)
            subjects.append(subject)
            at[stage] += 1
            if kind not in (POST, SEND):
                continue
            if stamps[subject] < 0:
                stamps[subject] = level
                continue
            matched[subject] = 1 + max(level, stamps[subject])
            matches[matched[subject]].append(subject)
            ready.extend(held.pop(subject, ()))
        places[stage] = level, rank, slot
    assert not held, "stages wait for each other for ever"
    last = max([level for level, *_ in groups] + list(matches), default=-1)
    found = [Level(np.array(matches[number], dtype=int), []) for number in range(last + 1)]
    for (level, _, _, kind), (stages, subjects) in sorted(groups.items(), key=lambda item: item[0][:3]):
        found[level].groups.append(OperationGroup(kind, np.array(stages), np.array(subjects)))
    return found


def action_batches(actions: Sequence[Action], chunks: int) -> list[range]:
    """Return the positions of each batch of actions, after which stages exchange messages."""
    ends = list(accumulate(map(len, batches(actions, chunks)), initial=0))
    return [range(begin, end) for begin, end in pairwise(ends)]
