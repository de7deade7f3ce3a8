"""Times of all actions of a step as a recurrence on arrays of stages and cases.

The items of an action take the same time wherever the action stands in the schedule, except while a collective of an
earlier action is under way. So a step is a longest path over actions and messages between stages. The few other actions
(gathers of parameters, reductions of gradients) are timed item by item by `repro.simulate.time.stage.StageStreams`,
which also runs the same step event by event, as the reference of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from repro.config import Layout
from repro.config.systems.unknowns import Lanes
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD
from repro.simulate.time.breakdown import STAGE_SEND, NoBreakdown, StageTime
from repro.simulate.time.cross_stage import GROUPS_ACROSS_STAGES, StageItems, UndelayedRun
from repro.simulate.time.device import in_any_lane, maximum_of
from repro.simulate.time.operations import END, RUN, SEND, WAIT, StepOperations, step_operations
from repro.simulate.time.outlines import INNER_GROUP
from repro.simulate.time.program import Await, Issue, Send
from repro.simulate.time.stage import StageStreams
from repro.simulate.time.steady_state import StageSamples, period_actions

PHASES = (FORWARD, BACKWARD)


def run_actions(
    stages: Sequence[StageStreams], layout: Layout, compared: Sequence[range]
) -> list[StageSamples] | None:
    """Run the actions of `stages`, which have reached the step; None if only the events can time them.

    Return samples of each stage after the actions at the positions `compared`.
    """
    operations = step_operations(layout)
    found = _distinct_bodies(stages, operations)
    return None if found is None else _Recurrence(stages, layout, operations, *found).run(compared)


class _Body(NamedTuple):
    """Items of an action around its message to another stage."""

    items: StageItems
    payload: int
    """Bytes of the message; -1 without a message."""
    rest: StageItems
    """Items after the message."""

    @property
    def run(self) -> UndelayedRun | None:
        """The run that is all of `items`; None if there are other items, or none."""
        (only,) = self.items if len(self.items) == 1 else (None,)
        return only if isinstance(only, UndelayedRun) else None


def _distinct_bodies(
    stages: Sequence[StageStreams], operations: StepOperations
) -> tuple[list[_Body], Lanes] | None:
    """Return the distinct actions, and the index of each action, [stages, actions].

    None if an action has several messages, or a collective across stages.
    """
    found: list[_Body] = []
    numbers: dict[int, int] = {}
    places = np.zeros((len(stages), len(stages[0].actions)), dtype=int)
    across = GROUPS_ACROSS_STAGES if len(stages) > 1 else ()
    for stage in stages:
        for position, piece in enumerate(stage.pieces):
            number = places[stage.stage, position] = numbers.setdefault(id(piece), len(numbers))
            if number < len(found):
                continue
            sends = [place for place, item in enumerate(piece) if isinstance(item, Send)]
            if len(sends) > 1 or any(isinstance(item, Issue) and item.group in across for item in piece):
                return None
            place = sends[0] if sends else len(piece)
            sent = piece[place] if sends else None
            payload = sent.payload if isinstance(sent, Send) else -1
            found.append(_Body(piece[:place], payload, piece[place + 1 :]))
    for (sender, *_), position in zip(operations.routes, operations.senders, strict=True):
        assert found[places[sender, position]].payload >= 0, "an action of the schedule sends nothing"
    return found, places


class _Recurrence:
    """Evaluation of the operations of a step, in seconds."""

    def __init__(
        self,
        stages: Sequence[StageStreams],
        layout: Layout,
        operations: StepOperations,
        bodies: Sequence[_Body],
        body_of: Lanes,
    ):
        self.stages, self.layout, self.operations = stages, layout, operations
        self.bodies, self.body_of = bodies, body_of
        self.run_of = [body.run for body in bodies]
        self.is_plain = np.array([not body.items or body.run is not None for body in bodies])
        self.has_rest = np.array([bool(body.rest) for body in bodies])
        durations = [run.seconds if run is not None else 0.0 for run in self.run_of]
        seconds, second_of = self._message_seconds()
        starts = [stage.now for stage in stages]
        numbers = [*durations, *seconds, *starts, stages[0].all.overlap_cost]
        for body in bodies:
            items = (*body.items, *body.rest)
            numbers += [item.seconds for item in items if not isinstance(item, (Await, Send))]
        self.is_scalar = not any(isinstance(number, np.ndarray) for number in numbers)
        lanes = max(map(np.size, numbers))
        self.durations, self.now = _rows(durations, lanes), _rows(starts, lanes)
        self.seconds = _rows(seconds, lanes)[second_of]
        """Of each message, [messages, lanes]."""
        count = len(operations.routes)
        self.ready = np.full((count, lanes), -np.inf)
        """Later of a message's send and its receive, as far as they are known."""
        self.ends = np.full((count + 1, lanes), -np.inf)
        """Ends of the messages. The last row is the predecessor of the first message of each route."""
        self.previous = np.array(operations.previous, dtype=int)
        self.receivers = np.array([route[1] for route in operations.routes], dtype=int)
        self.is_backward = np.array(
            [[int(a.kind == BACKWARD) for a in actions] for actions in operations.actions]
        )
        self.has_breakdown = not isinstance(stages[0].time, NoBreakdown)
        self.began = self.now.copy()
        self.bubble, self.exposed, self.communication = np.zeros((3, len(stages), lanes))
        self.phases = np.zeros((2, len(stages), lanes))
        self.busy: dict[int, float] = {}
        """Ends of the collectives of stages that may have collectives under way."""
        for stage in stages:
            self._note_busy(stage)

    def _message_seconds(self) -> tuple[list[float], Lanes]:
        """Return the distinct seconds of messages, and the index of each message's."""
        operations, state = self.operations, self.stages[0].all
        known: dict[tuple[tuple[int, int, int], ...], int] = {}
        found: list[float] = []
        parts = []
        for route, position in zip(operations.routes, operations.senders, strict=True):
            parts.append((route[0], route[1], self.bodies[self.body_of[route[0], position]].payload))
        index = np.zeros(len(parts), dtype=int)
        for message, together in enumerate(operations.together):
            key = tuple(parts[other] for other in together)
            index[message] = known.setdefault(key, len(known))
            if len(known) > len(found):
                found.append(sum(state.seconds((*key_part[:2], 0, 0), key_part[2]) for key_part in key))
        return found or [0.0], index

    def run(self, compared: Sequence[range]) -> list[StageSamples]:
        """Evaluate all levels and give the results to the stages; return the samples at `compared`."""
        samples = [StageSamples([], []) for _ in self.stages]
        for level in self.operations.levels:
            if len(level.matches):
                messages = level.matches
                start = np.maximum(self.ready[messages], self.ends[self.previous[messages]])
                self.ends[messages] = start + self.seconds[messages]
            for kind, stages, subjects in level.groups:
                if kind == WAIT:
                    self._wait(stages, subjects)
                elif kind == RUN:
                    self._run(stages, subjects)
                elif kind == END:
                    self._end(stages, subjects)
                    if compared:
                        self._sample(stages, subjects, compared, samples)
                else:
                    self.ready[subjects] = np.maximum(self.ready[subjects], self.now[stages])
                    if kind == SEND and self.has_breakdown:
                        np.add.at(self.communication, stages, self.seconds[subjects])
        for stage in self.stages:
            stage.now = self._value(self.now[stage.stage])
            if self.has_breakdown:
                stage.phase_began, stage.time = self._value(self.began[stage.stage]), self._breakdown(stage)
        return samples

    def _wait(self, stages: Lanes, messages: Lanes) -> None:
        now, ends = self.now[stages], self.ends[messages]
        if self.has_breakdown:
            seconds = self.seconds[messages]
            delay, waited = np.maximum(0.0, ends - now), np.maximum(0.0, ends - seconds - now)
            self.bubble[stages] += waited
            self.exposed[stages] += delay - waited
            self.communication[stages] += (self.receivers[messages] == stages)[:, None] * seconds
        self.now[stages] = np.maximum(now, ends)

    def _run(self, stages: Lanes, positions: Lanes) -> None:
        bodies = self.body_of[stages, positions]
        together = self.is_plain[bodies]
        if self.busy or not together.all():
            for place, stage in enumerate(stages.tolist()):
                if not together[place] or self._is_delayed(stage):
                    together[place] = False
                    self._run_alone(self.stages[stage], self.bodies[bodies[place]].items)
            stages, bodies = stages[together], bodies[together]
        self.now[stages] += self.durations[bodies]
        if self.has_breakdown:
            for stage, body in zip(stages.tolist(), bodies.tolist(), strict=True):
                run = self.run_of[body]
                if run is not None:
                    self.stages[stage].taken[run] += 1

    def _is_delayed(self, stage: int) -> bool:
        """Return whether a collective under way may delay the next action of a stage."""
        if stage in self.busy and not in_any_lane(np.asarray(self.busy[stage] > self.now[stage])):
            del self.busy[stage]
        return stage in self.busy

    def _run_alone(self, stage: StageStreams, body: StageItems) -> None:
        """Run the items of one action."""
        stage.now = self._value(self.now[stage.stage])
        for waited in stage.run_items(body, ""):
            raise AssertionError(f"an action waits for {waited}")
        self.now[stage.stage] = stage.now
        self._note_busy(stage)

    def _note_busy(self, stage: StageStreams) -> None:
        groups = stage.streams if in_any_lane(stage.all.overlap_cost) else (INNER_GROUP,)
        unfinished = any(i.group == INNER_GROUP for queue in stage.under_way.values() for _, i in queue)
        ends = (float("inf") if unfinished else 0.0, *(stage.streams[group] for group in groups))
        self.busy[stage.stage] = maximum_of(ends)

    def _end(self, stages: Lanes, positions: Lanes) -> None:
        bodies = self.body_of[stages, positions]
        for place in np.flatnonzero(self.has_rest[bodies]).tolist():
            self._run_alone(self.stages[int(stages[place])], self.bodies[bodies[place]].rest)
        if not self.has_breakdown:
            return
        now, phases = self.now[stages], self.is_backward[stages, positions]
        np.add.at(self.phases, (phases, stages), now - self.began[stages])
        self.began[stages] = now

    def _sample(
        self, stages: Lanes, positions: Lanes, compared: Sequence[range], samples: Sequence[StageSamples]
    ) -> None:
        for number, position in zip(stages.tolist(), positions.tolist(), strict=True):
            if position not in compared[number]:
                continue
            stage = self.stages[number]
            stage.now = self._value(self.now[number])
            arrivals = (self.ends[message] for message in self.operations.waits[number][position])
            samples[number].times.append([*stage.pending_times(), *arrivals])
            ends_period = (position + 1 - compared[number].start) % period_actions(self.layout) == 0
            if self.has_breakdown and ends_period:
                found = self._breakdown(stage)
                for run, times in stage.taken.items():
                    found.add(run.time, times)
                samples[number].breakdowns.append(found)

    def _breakdown(self, stage: StageStreams) -> StageTime:
        """Return the breakdown of a stage, without the runs that it has counted."""
        found, number = stage.time.copy(), stage.stage
        for phase, seconds in zip(PHASES, self.phases[:, number], strict=True):
            found.by_phase[phase] += self._value(seconds)
        if self.operations.routes:
            found.bubble += self._value(self.bubble[number])
            found.exposed[STAGE_SEND] += self._value(self.exposed[number])
            found.communication[STAGE_SEND] += self._value(self.communication[number])
        return found

    def _value(self, row: Lanes) -> float:
        """Return a copy of a row, as a number if the step has one case."""
        return float(row[0]) if self.is_scalar else row.copy()


def _rows(numbers: Sequence[float], lanes: int) -> Lanes:
    """Return numbers or arrays [lanes] as an array [numbers, lanes]."""
    return np.array([np.broadcast_to(number, lanes) for number in numbers])
