"""Times of all actions (forward or backward passes) of a step, as a recurrence on arrays.

Arrays have the dimensions stages and lanes (sampled cases of the uncertain inputs). An action takes the same time
everywhere in the schedule unless a collective of an earlier action delays it. The step time is therefore a longest
path. Delayed actions are timed item by item by `repro.simulate.time.stage.StageStreams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from repro.config import Layout
from repro.config.systems.unknowns import Lanes
from repro.parallel.pipeline.boundary import Boundary
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD
from repro.simulate.time.breakdown import STAGE_SEND, StageTime
from repro.simulate.time.cross_stage import StageItems, UndelayedRun
from repro.simulate.time.program import GROUPS_ACROSS_STAGES, Await, Issue, Send
from repro.simulate.time.stage import StageStreams
from repro.simulate.time.steady_state import Cycle, PeriodSamples
from repro.simulate.time.step_order import DEPART, FINISH, SLOTS, START, StepOrder


def run_actions(stages: Sequence[StageStreams], layout: Layout, *, compare: bool) -> ActionTimes | None:
    """Return the times of all actions (forward and backward passes) of pipeline stages that have begun the step.

    Return None if an action has a collective across stages. `compare`: store times of the schedule's last periods, in
    which `ActionTimes.samples` finds cycles.
    """
    order = stages[0].all.order
    found = _distinct_bodies(stages, order)
    if found is None:
        return None
    times = ActionTimes(stages, order, *found)
    if compare:
        times.samples = PeriodSamples(layout, order, times.now.shape[1])
        uneven = ~times.is_plain | times.has_rest
        for number, stop in enumerate(times.samples.stop.tolist()):
            part = times.body_of[number, stop - times.samples.length : stop]
            if uneven[part].any():
                times.uneven.add(number)
    times.run()
    return times


class _Body(NamedTuple):
    """Operators and messages of an action (a forward or backward pass), before and after its send to another stage."""

    items: StageItems
    """Timed operators, collectives and waits before the message to another stage."""
    payload: int
    """Bytes of the message to another stage; -1 if the action sends none."""
    rest: StageItems
    """Timed operators, collectives and waits after the message to another stage."""

    @property
    def run(self) -> UndelayedRun | None:
        """The block of operators timed as one duration, if the pass consists of one such block; otherwise None."""
        (only,) = self.items if len(self.items) == 1 else (None,)
        return only if isinstance(only, UndelayedRun) else None


def _distinct_bodies(stages: Sequence[StageStreams], order: StepOrder) -> tuple[list[_Body], Lanes] | None:
    """Return distinct operator lists of passes, and the index of each pass's list; None if collectives span stages."""
    found: list[_Body] = []
    known: dict[int, Lanes] = {}
    across = GROUPS_ACROSS_STAGES if len(stages) > 1 else ()
    for stage in stages:
        if id(stage.program) in known:
            continue
        index = known[id(stage.program)] = np.full(order.actions.shape[1], -1)
        micro_batches = order.numbers.shape[1]
        shown = np.array([stage.program.shown(one, micro_batches - 1) for one in range(micro_batches)])
        for action, items in stage.program.segments.items():
            numbers = order.numbers[Boundary.channel(action.kind), shown == action.micro_batch, action.chunk]
            if not len(numbers):
                continue
            piece = stage.prepared(items)
            sends = [place for place, item in enumerate(piece) if isinstance(item, Send)]
            assert len(sends) < 2, "an action of a pipeline schedule sends at most one message"
            if any(isinstance(item, Issue) and item.group in across for item in piece):
                return None
            place = sends[0] if sends else len(piece)
            sent = piece[place] if sends else None
            payload = sent.payload if isinstance(sent, Send) else -1
            index[numbers] = len(found)
            found.append(_Body(piece[:place], payload, piece[place + 1 :]))
    places = np.stack([known[id(stage.program)][order.actions[stage.stage]] for stage in stages])
    assert places.min() >= 0, "no operators or messages are recorded for an action of the schedule"
    return found, places


class ActionTimes:
    """Evaluation of the times in seconds of all actions (forward and backward passes) of a step."""

    def __init__(
        self, stages: Sequence[StageStreams], order: StepOrder, bodies: Sequence[_Body], body_of: Lanes
    ):
        self.stages, self.order, self.bodies, self.body_of = stages, order, bodies, body_of
        self.is_plain = np.array([not body.items or body.run is not None for body in bodies])
        self.has_rest = np.array([bool(body.rest) for body in bodies])
        runs = [body.run for body in bodies if body.run is not None]
        self.keys = {key for run in runs for key in run.keys}
        """Keys (`Trace.keys`) of all collectives in passes that are timed as one duration."""
        self.groups = {group for run in runs for group in run.groups}
        """Process groups of all collectives in passes that are timed as one duration."""
        durations = [body.run.seconds if body.run is not None else 0.0 for body in bodies]
        seconds, self.second_of = self._message_seconds()
        starts = [stage.now for stage in stages]
        numbers = [*durations, *seconds, *starts, stages[0].all.overlap_cost]
        for body in bodies:
            items = (*body.items, *body.rest)
            numbers += [item.seconds for item in items if not isinstance(item, (Await, Send))]
        self.is_scalar = not any(isinstance(number, np.ndarray) for number in numbers)
        lanes = max(map(np.size, numbers))
        self.durations, self.now, self.seconds = (_rows(of, lanes) for of in (durations, starts, seconds))
        self.ends = np.zeros((2 * SLOTS * len(stages) + 1, lanes))
        """End times of message transfers; between the posts of send and receive, the time of the first post."""
        self.stamps = np.zeros(len(order.slots), dtype=int)
        """Number of posts of each message: 0 to 2, which are its send and its receive."""
        self.stamps[-1] = 2
        self.samples: PeriodSamples | None = None
        shape = body_of.shape
        # The arrays below are for the time breakdown, which needs the best values of uncertain inputs only.
        self.first_start, self.finished = self.now[:, 0].copy(), np.zeros(shape)
        self.first_end = np.zeros(len(order.slots))
        """Time in seconds at which each message's transfer ends."""
        self.waited_at = [np.zeros(awaited.shape) for awaited in (*order.awaited, order.last)]
        """Times at which stages begin to wait for messages; shapes are those of `order.awaited` and `order.last`."""
        self.is_alone = ~self.is_plain[body_of]
        """Whether the operators of each action (a pass) were timed one by one, [stages, actions]."""
        self.uneven: set[int] = set()
        """Pipeline stages with actions that are timed item by item in every period of the schedule."""
        self.accounts: dict[tuple[int, int], StageTime] = {}
        """Accumulated time breakdown of the passes timed operator by operator, by stage and schedule position."""
        self.busy, self.open = set(range(len(stages))), set(range(len(stages)))
        """Pipeline stages whose next action a collective may delay, and stages that may have unfinished collectives."""

    def _message_seconds(self) -> tuple[list[float], Lanes]:
        """Return the distinct seconds of messages between pipeline stages, and the index of each message's seconds."""
        order, state = self.order, self.stages[0].all
        messages = np.flatnonzero(order.receivers[:-1] >= 0)
        if not len(messages):
            return [0.0], np.zeros(len(order.slots), dtype=int)
        payloads = np.array([body.payload for body in self.bodies])[self.body_of.ravel()[messages]]
        assert payloads.min() >= 0, "an action of a pipeline schedule sends a negative number of bytes"
        senders, receivers = messages // order.actions.shape[1], order.receivers[messages]
        distinct, place = _distinct(np.stack([senders, receivers, payloads], axis=-1))
        alone = [state.network.send_seconds(c, from_stage=a, to_stage=b) for a, b, c in distinct.tolist()]
        of_message = np.full(len(order.slots), len(alone))
        of_message[messages] = place
        alone.append(0.0)
        distinct, place = _distinct(of_message[order.together])
        return [sum(alone[one] for one in row) for row in distinct.tolist()], place

    def run(self) -> None:
        """Evaluate the times of all actions, and store end time and breakdown of the step in each of `stages`."""
        order, count = self.order, self.order.actions.shape[1]
        everyone = np.arange(len(self.stages))
        position, step = np.zeros((2, len(everyone)), dtype=int)
        for column in order.first.T:
            self._stamp(everyone, column)
        left = everyone
        while len(left):
            moved = 0
            for number in (START, DEPART, FINISH):
                stages = left[step[left] == number]
                awaited = order.awaited[number]
                if awaited.shape[-1]:
                    known = self.stamps[awaited[stages, position[stages]]] == 2
                    stages = stages[known.all(axis=-1)]
                if not len(stages):
                    continue
                positions = position[stages]
                for column in range(awaited.shape[-1]):
                    self.waited_at[number][stages, positions, column] = self.now[stages, 0]
                    self._wait(stages, awaited[stages, positions, column])
                for column in order.stamped[number][stages, positions].T:
                    self._stamp(stages, column)
                if number == START:
                    self._compute(stages, positions)
                elif number == FINISH:
                    self._finish(stages, positions)
                    position[stages] += 1
                step[stages] = (number + 1) % 3
                moved += len(stages)
            assert moved, "deadlock: every pipeline stage waits for a message of another stage"
            left = left[position[left] < count]
        for column, messages in enumerate(order.last.T):
            self.waited_at[-1][:, column] = self.now[:, 0]
            self._wait(everyone, messages)
        for stage in self.stages:
            stage.now = self._value(self.now[stage.stage])
            stage.phase_began = float(self.finished[stage.stage, -1])
            stage.time.add(self._breakdown(stage.stage, 0, count), 1)

    def cycle_time(self, cycle: Cycle, stage: int) -> StageTime:
        """Return the breakdown of a pipeline stage's time over the last repetition of `cycle`."""
        begin, end = int(cycle.begin[stage]), int(cycle.end[stage])
        found = self._breakdown(stage, begin, end)
        if stage in self.uneven:
            found.add(self.accounts[stage, end], 1)
            found.add(self.accounts[stage, begin], -1)
        return found

    def _wait(self, stages: Lanes, messages: Lanes) -> None:
        self.now[stages] = np.maximum(self.now[stages], self.ends[self.order.slots[messages]])

    def _stamp(self, stages: Lanes, messages: Lanes) -> None:
        """Post the send or the receive of one message for each of `stages`; `NO_MESSAGE` stands for no message."""
        chosen = messages >= 0
        stages, messages = stages[chosen], messages[chosen]
        slots, now = self.order.slots[messages], self.now[stages]
        self.stamps[messages] += 1
        both = self.stamps[messages] == 2
        self.ends[slots[~both]] = now[~both]
        slots, messages = slots[both], messages[both]
        # Transfers need no queue: a stage posts a receive only after the preceding message of the sender has arrived.
        ends = np.maximum(self.ends[slots], now[both]) + self.seconds[self.second_of[messages]]
        self.ends[slots], self.first_end[messages] = ends, ends[:, 0]

    def _compute(self, stages: Lanes, positions: Lanes) -> None:
        bodies = self.body_of[stages, positions]
        together = self.is_plain[bodies]
        if self.busy or not together.all():
            for place, stage in enumerate(stages.tolist()):
                if not together[place] or self._is_delayed(stage):
                    together[place], self.is_alone[stage, positions[place]] = False, True
                    self._run_alone(self.stages[stage], self.bodies[bodies[place]].items)
            stages, bodies = stages[together], bodies[together]
        self.now[stages] += self.durations[bodies]

    def _is_delayed(self, number: int) -> bool:
        """Return whether an unfinished collective may delay the next action of a stage."""
        if number in self.busy:
            stage = self.stages[number]
            stage.now = self._value(self.now[number])
            under_way = any(queue and key in self.keys for key, queue in stage.under_way.items())
            if not under_way and stage.is_idle(self.groups):
                self.busy.remove(number)
        return number in self.busy

    def _run_alone(self, stage: StageStreams, body: StageItems) -> None:
        """Time the items of one action of a pipeline stage one by one."""
        stage.now = self._value(self.now[stage.stage])
        for waited in stage.run_items(body, ""):
            raise AssertionError(f"an action that is timed without other stages waits for {waited}")
        self.now[stage.stage] = stage.now
        self.busy.add(stage.stage)
        self.open.add(stage.stage)

    def _finish(self, stages: Lanes, positions: Lanes) -> None:
        bodies = self.body_of[stages, positions]
        for place in np.flatnonzero(self.has_rest[bodies]).tolist():
            self._run_alone(self.stages[int(stages[place])], self.bodies[bodies[place]].rest)
        self.finished[stages, positions] = self.now[stages, 0]
        if self.samples is not None:
            self._sample(self.samples, stages, positions)

    def _sample(self, samples: PeriodSamples, stages: Lanes, positions: Lanes) -> None:
        """Store the end times of the passes that the search for a repeating cycle of the schedule compares."""
        rows = samples.rows(stages, positions)
        sampled = rows >= 0
        stages, positions, rows = stages[sampled], positions[sampled], rows[sampled]
        messages = np.concatenate([awaited[stages, positions] for awaited in self.order.awaited], axis=-1)
        ends = self.ends[self.order.slots[messages]]
        now = samples.times[stages, rows, 0] = self.now[stages]
        samples.times[stages, rows, 1:] = np.where(messages[..., None] < 0, now[:, None], ends)
        for number, position, row in zip(stages.tolist(), positions.tolist(), rows.tolist(), strict=True):
            stage = self.stages[number]
            if number in self.open:
                stage.now = self._value(self.now[number])
                samples.further[number, row] = stage.pending_times()
                if not samples.further[number, row]:
                    self.open.remove(number)
            if number in self.uneven and row % samples.stride == 0:
                self.accounts[number, position + 1] = stage.time.copy()

    def _breakdown(self, stage: int, begin: int, end: int) -> StageTime:
        """Return the time breakdown of a stage's actions `begin` to `end` - 1, without those timed item by item."""
        found, order = StageTime(), self.order
        part = slice(begin, end)
        awaited = [messages[stage, part].ravel() for messages in order.awaited]
        since = [times[stage, part].ravel() for times in self.waited_at[:-1]]
        if end == self.body_of.shape[1]:
            awaited.append(order.last[stage])
            since.append(self.waited_at[-1][stage])
        messages, now = np.concatenate(awaited), np.concatenate(since)
        messages, now = messages[messages >= 0], now[messages >= 0]
        first_seconds = self.seconds[:, 0][self.second_of]
        seconds, ends = first_seconds[messages], self.first_end[messages]
        bubble = float(np.maximum(0.0, ends - seconds - now).sum())
        sent = np.concatenate([stamped[stage, part].ravel() for stamped in order.stamped])
        sent = sent[(sent >= 0) & (sent // self.body_of.shape[1] == stage)]
        if order.slots.max() >= 0:
            found.bubble = bubble
            found.exposed[STAGE_SEND] = float(np.maximum(0.0, ends - now).sum()) - bubble
            received = seconds[order.receivers[messages] == stage]
            found.communication[STAGE_SEND] = float(received.sum() + first_seconds[sent].sum())
        finished = np.concatenate([self.first_start[[stage]], self.finished[stage]])[begin : end + 1]
        for phase, is_backward in ((FORWARD, False), (BACKWARD, True)):
            chosen = order.is_backward[stage, part] == is_backward
            found.by_phase[phase] = float(np.diff(finished)[chosen].sum())
        bodies = self.body_of[stage, part][~self.is_alone[stage, part]]
        for body, times in enumerate(np.bincount(bodies, minlength=len(self.bodies)).tolist()):
            run = self.bodies[body].run
            if times and run is not None:
                found.add(run.time, times)
        return found

    def _value(self, row: Lanes) -> float:
        """Return times in seconds as an array with one entry per sampled case; a number if no input is uncertain."""
        return float(row[0]) if self.is_scalar else row.copy()


def _rows(numbers: Sequence[float], lanes: int) -> Lanes:
    """Return numbers, or arrays over `lanes` sampled cases of the uncertain inputs, as one array [numbers, lanes]."""
    return np.array([np.broadcast_to(number, lanes) for number in numbers])


def _distinct(rows: Lanes) -> tuple[Lanes, Lanes]:
    """Return the distinct rows of an array of small non-negative integers, and the index of each row among them."""
    codes = np.zeros(len(rows), dtype=int)
    for column in rows.T:
        values, place = np.unique(column, return_inverse=True)
        codes = codes * len(values) + place
    _, first, index = np.unique(codes, return_index=True, return_inverse=True)
    return rows[first], index
