"""Order of a step's actions (forward and backward passes) and messages as arrays, which depend only on the schedule.

A message has the number `stage * actions + position` of the action that sends it. `NO_MESSAGE` stands for no message.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from repro.config import Layout
from repro.config.systems.unknowns import Lanes
from repro.parallel.pipeline.boundary import Boundary, exchanges
from repro.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    Schedule,
    batches,
    build_schedule,
    dependency_of,
)

NO_MESSAGE = -1
START, DEPART, FINISH = range(3)
"""Points of an action at which messages are awaited and posted: before compute, before send, before the next action."""
SLOTS = 2 * Boundary.UNDER_WAY
"""Maximum number of messages from one stage in one direction whose end times are still needed."""
MAX_ORDERS = 16
"""Maximum number of pipeline schedules whose arrays (`StepOrder`) a process caches."""


class StepOrder(NamedTuple):
    """Actions of all pipeline stages, and the messages that each action awaits and posts. A dimension `any` is as long
    as the largest number of messages, and `NO_MESSAGE` fills the rest."""

    schedule: Schedule
    numbers: Lanes
    """Number of the forward or backward pass for each kind, micro-batch and chunk, [kinds, micro-batches, chunks]."""
    actions: Lanes
    """Number of the action (a forward or backward pass) at each schedule position, [stages, actions]."""
    is_backward: Lanes
    """Whether the action at each schedule position is a backward pass, [stages, actions]."""
    receivers: Lanes
    """Pipeline stage that receives each message, as an array [messages]."""
    slots: Lanes
    """Index of each message in an array of end times; equal for messages whose times are never needed together."""
    first: Lanes
    """Messages whose receive each stage posts before its first action, [stages, any]."""
    awaited: tuple[Lanes, ...]
    """Messages that each action awaits before compute, its send and the next action, as [stages, actions, any]."""
    stamped: tuple[Lanes, ...]
    """Messages whose send or receive each action posts after its waits, in 3 arrays [stages, actions, any]."""
    last: Lanes
    """Messages that each stage awaits after its last action, [stages, any]."""
    together: Lanes
    """For each message, all messages (with itself) that two stages exchange in the same call, [messages, any]."""


def step_order(layout: Layout) -> StepOrder:
    """Return the order of all actions and messages of a step of `layout`."""
    return _order(layout.schedule, layout.pp, layout.accumulation, layout.chunks, exchange=exchanges(layout))


@lru_cache(MAX_ORDERS)
def _order(name: str, stages: int, micro_batches: int, chunks: int, *, exchange: bool) -> StepOrder:
    schedule = build_schedule(name, stages, micro_batches, chunks)
    count = len(schedule[0])
    number_of = {id(action): number for number, action in enumerate(schedule[0])}
    actions = np.array([[number_of[id(action)] for action in of_stage] for of_stage in schedule])
    is_backward = np.array([action.kind == BACKWARD for action in schedule[0]])[actions]
    numbers = np.empty((2, micro_batches, chunks), dtype=int)
    for number, action in enumerate(schedule[0]):
        numbers[Boundary.channel(action.kind), action.micro_batch, action.chunk] = number

    positions = np.empty_like(actions)
    np.put_along_axis(positions, actions, np.arange(count)[None, :], axis=1)
    inputs, sends = np.full((2, stages, count), NO_MESSAGE)
    receivers, previous, slots = np.full((3, stages * count + 1), NO_MESSAGE)
    for stage in range(stages):
        for kind, chunk in ((kind, chunk) for kind in (FORWARD, BACKWARD) for chunk in range(chunks)):
            needed = dependency_of(Action(kind, 0, chunk), stage, stages, chunks)
            if needed is not None and needed[0] != stage:
                sender, of_kind = needed[0], numbers[Boundary.channel(kind)]
                sent_at = positions[sender, of_kind[:, needed[1].chunk]]
                messages = sender * count + sent_at
                inputs[stage, positions[stage, of_kind[:, chunk]]] = sends[sender, sent_at] = messages
                receivers[messages] = stage
    last: Lanes = np.full((stages, 2, Boundary.UNDER_WAY), NO_MESSAGE)
    for stage in range(stages):
        for channel in (0, 1):
            route = sends[stage, (is_backward[stage] == channel) & (sends[stage] >= 0)]
            previous[route[1:]] = route[:-1]
            slots[route] = (2 * stage + channel) * SLOTS + np.arange(len(route)) % SLOTS
            last[stage, channel, : len(route)] = route[-Boundary.UNDER_WAY :]

    none = np.full((stages, count, 0), NO_MESSAGE)
    if not exchange:
        first = inputs[:, :1]
        awaited = inputs[..., None], previous[previous[sends]][..., None], none
        stamped = _following(inputs)[..., None], sends[..., None], none
        together = np.arange(stages * count + 1)[:, None]
        last = last.reshape(stages, -1)
    else:
        # Messages are exchanged after each batch: one action (pass), or a forward and a backward pass of interleaved
        # chunks. `is_inner` marks the first action of such a pair, after which no exchange follows.
        is_inner = np.ones((stages, count), dtype=bool)
        for stage, of_stage in enumerate(schedule):
            is_inner[stage, np.cumsum([len(batch) for batch in batches(of_stage, chunks)]) - 1] = False
        sent = [np.where(np.roll(is_inner, 1, axis=1), np.roll(sends, 1, axis=1), NO_MESSAGE), sends]
        received = [inputs, np.where(is_inner, _following(inputs), NO_MESSAGE)]
        first = np.stack([messages[:, 0] for messages in received], axis=-1)
        at_start = np.full((stages, count, 2), NO_MESSAGE)
        at_start[:, 0] = first
        exchanged = np.stack([*sent, *map(_following, received)], axis=-1)
        exchanged[is_inner] = NO_MESSAGE
        awaited, stamped = (at_start, none, exchanged), (none, exchanged, none)
        together = np.full((stages * count + 1, 2), NO_MESSAGE)
        for messages in sent:
            together[messages[~is_inner]] = np.stack(sent, axis=-1)[~is_inner]
        together[NO_MESSAGE] = NO_MESSAGE
        last = last[..., :0].reshape(stages, -1)
    return StepOrder(
        schedule, numbers, actions, is_backward, receivers, slots, first,
        tuple(map(_used, awaited)), tuple(map(_used, stamped)), last, together,
    )  # fmt: skip


def _following(messages: Lanes) -> Lanes:
    """Shift an array of messages [stages, actions] by one: each action gets the message of the next action."""
    found = np.roll(messages, -1, axis=1)
    found[:, -1] = NO_MESSAGE
    return found


def _used(messages: Lanes) -> Lanes:
    """Return `messages` [stages, actions, any] without the columns in which no action has a message."""
    return messages[..., (messages >= 0).any(axis=(0, 1))]
