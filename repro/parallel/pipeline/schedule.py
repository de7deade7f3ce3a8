"""Pipeline schedules as data: the actions of each stage in order, and the cost of that order.

The runner executes a schedule, and `repro schedule` prints it. `timeline` computes exact times from those of a stage's
forward and backward pass, without communication (2104.04473 sec. 2.2). Symbols: p stages, m micro-batches, v chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from numbers import Rational
from typing import NamedTuple

from repro.config.errors import require
from repro.config.layout import SCHEDULES

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True)
class Action:
    """Forward or backward pass of one micro-batch through one chunk of a stage's layers; indices begin at 0."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Schedule = tuple[tuple[Action, ...], ...]
"""Pipeline schedule: the forward and backward passes of each stage in order, as `schedule[stage][position]`."""


class TimedAction(NamedTuple):
    """Forward or backward pass of a pipeline stage, with its start time and stop time."""

    action: Action
    start: Fraction
    stop: Fraction


def build_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the schedule `name`: `gpipe`, `1f1b` (with flush) or `interleaved` (2104.04473 fig. 3-4).

    Raises `ConfigError` if the schedule does not exist: interleaving needs p >= 2, v >= 2 and m a multiple of p.
    """
    _check(name, stages, micro_batches, chunks)
    forwards = [Action(FORWARD, *pair) for pair in _order(stages, micro_batches, chunks)]
    backwards = [Action(BACKWARD, a.micro_batch, chunks - 1 - a.chunk) for a in forwards]
    return tuple(
        tuple(_alternate(forwards, backwards, _warm_up(name, stage, stages, micro_batches, chunks)))
        for stage in range(stages)
    )


def dependency_of(action: Action, stage: int, stages: int, chunks: int = 1) -> tuple[int, Action] | None:
    """Return the (stage, action) whose result a forward or backward `action` needs; None for the first layers' forward.

    Part k = chunk * p + stage of the model: forward F(k) needs F(k - 1), and backward B(k) needs B(k + 1).  B of the
    last part needs F of the same part.
    """
    part = action.chunk * stages + stage
    if action.kind == FORWARD:
        before = part - 1
    elif part == stages * chunks - 1:
        return stage, Action(FORWARD, action.micro_batch, action.chunk)
    else:
        before = part + 1
    if before < 0:
        return None
    return before % stages, Action(action.kind, action.micro_batch, before // stages)


def batches(actions: Sequence[Action], chunks: int = 1) -> list[tuple[Action, ...]]:
    """Return a stage's `actions` in groups, after each of which software without overlap exchanges messages.

    Such an exchange sends outputs and receives the next inputs, without concurrent computation. There is an exchange
    after every action, but only after each pair of forward and backward in the steady phase of interleaved chunks
    (Megatron-LM of 2021, `send_forward_backward_recv_forward_backward`).
    """
    backwards = [position for position, action in enumerate(actions) if action.kind == BACKWARD]
    turns = sum(action.kind == FORWARD for action in actions[backwards[0] :])
    if chunks == 1 or not turns:
        return [(action,) for action in actions]
    begin = backwards[0] - 1
    end = begin + 2 * (turns + 1)
    pairs = zip(actions[begin:end:2], actions[begin + 1 : end : 2], strict=True)
    return [*((action,) for action in actions[:begin]), *pairs, *((action,) for action in actions[end:])]


def in_flight(actions: Sequence[Action]) -> int:
    """Return a stage's maximum number of (micro-batch, chunk) pairs that are between forward and backward."""
    live = most = 0
    for action in actions:
        live += 1 if action.kind == FORWARD else -1
        most = max(most, live)
    return most


def peak_in_flight(name: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Return a stage's maximum number of in-flight (micro-batch, chunk) pairs by a formula for schedule `name`."""
    return min(micro_batches * chunks, _warm_up(name, stage, stages, micro_batches, chunks) + 1)


def timeline(
    schedule: Schedule, forward: Rational | int = 1, backward: Rational | int = 2
) -> list[list[TimedAction]]:
    """Return start and stop of every action of a schedule, each as early as its stage's order and its input allow.

    `forward` and `backward` are the times of one micro-batch on one full stage; an action on one of v chunks takes 1/v
    of these times. Raises `ValueError` on a deadlock of stages.
    """
    unit, starts, durations = _starts(schedule, forward, backward)
    times: dict[int, Fraction] = {}

    # Cache the fractions, because their creation is slow and a schedule has few different times.
    def exact(ticks: int) -> Fraction:
        if ticks not in times:
            times[ticks] = Fraction(ticks, unit)
        return times[ticks]

    return [
        [
            TimedAction(action, exact(start), exact(start + durations[action.kind]))
            for action, start in zip(actions, begin, strict=True)
        ]
        for actions, begin in zip(schedule, starts, strict=True)
    ]


def bubble_ratio(schedule: Schedule, forward: Rational | int = 1, backward: Rational | int = 2) -> Fraction:
    """Return the bubble over ideal time, (t - m (t_f + t_b)) / (m (t_f + t_b)), of a schedule (2104.04473 sec. 2.2)."""
    _, starts, durations = _starts(schedule, forward, backward)
    busy = max(sum(durations[action.kind] for action in actions) for actions in schedule)
    total = max(
        begin[-1] + durations[actions[-1].kind] for actions, begin in zip(schedule, starts, strict=True)
    )
    return Fraction(total - busy, busy)


def chunks_of(schedule: Schedule) -> int:
    """Return v, the number of model chunks per pipeline stage in a schedule."""
    return 1 + max(action.chunk for actions in schedule for action in actions)


def _check(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    require(name in SCHEDULES, "schedule", name, f"one of {', '.join(SCHEDULES)}")
    for key, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        require(value >= 1, key, value, "an integer of at least 1")
    if name != "interleaved":
        require(chunks == 1, "chunks", chunks, "1 chunk per stage unless schedule = interleaved")
        return
    require(chunks >= 2, "chunks", chunks, "at least 2 chunks per stage with schedule = interleaved")
    require(stages >= 2, "stages", stages, "at least 2 pipeline stages with schedule = interleaved")
    expected = f"a multiple of stages = {stages} with schedule = interleaved"
    require(micro_batches % stages == 0, "micro_batches", micro_batches, expected)


def _order(stages: int, micro_batches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch, chunk) of a stage's forward passes; p micro-batches of a chunk precede the next chunk."""
    group = stages if chunks > 1 else micro_batches
    for first in range(0, micro_batches, group):
        for chunk in range(chunks):
            for micro_batch in range(first, first + group):
                yield micro_batch, chunk


def _warm_up(name: str, stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Return the number of warm-up forward passes of `stage`, before forward and backward passes alternate."""
    everything = micro_batches * chunks
    if name == "gpipe":
        return everything
    if name == "1f1b":
        return min(stages - 1 - stage, everything)
    # As in Megatron-LM: with as many micro-batches as stages, all forward passes precede all backward passes.
    if micro_batches == stages:
        return everything
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> Iterator[Action]:
    """Yield `warm_up` forward passes, then forward and backward passes alternately, then the other backward passes."""
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


def _starts(
    schedule: Schedule, forward: Rational | int, backward: Rational | int
) -> tuple[int, list[list[int]], dict[str, int]]:
    """Return integer ticks per unit of time, and in ticks the start of every action and the duration of each kind."""
    stages, chunks = len(schedule), chunks_of(schedule)
    exact = {FORWARD: Fraction(forward) / chunks, BACKWARD: Fraction(backward) / chunks}
    for key, time in (("forward", exact[FORWARD]), ("backward", exact[BACKWARD])):
        require(time > 0, key, str(time * chunks), "a time greater than 0")
    unit = lcm(exact[FORWARD].denominator, exact[BACKWARD].denominator)
    durations = {kind: int(time * unit) for kind, time in exact.items()}

    starts: list[list[int]] = [[] for _ in range(stages)]
    clock = [0] * stages
    done: dict[tuple[int, Action], int] = {}
    # Keys: unfinished pairs (stage, action), where an action is one pass. Values: the stage that waits for its result.
    waiting: dict[tuple[int, Action], int] = {}
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        while len(starts[stage]) < len(schedule[stage]):
            action = schedule[stage][len(starts[stage])]
            start, input_ = clock[stage], dependency_of(action, stage, stages, chunks)
            if input_ is not None:
                if input_ not in done:
                    waiting[input_] = stage
                    break
                start = max(start, done[input_])
            starts[stage].append(start)
            clock[stage] = done[stage, action] = start + durations[action.kind]
            if (stage, action) in waiting:
                ready.append(waiting.pop((stage, action)))
    for (other, missing), stage in waiting.items():
        action = schedule[stage][len(starts[stage])]
        never = f"{missing} of stage {other}, which never runs"
        raise ValueError(f"deadlock: {action} of stage {stage} waits for {never}")
    return unit, starts, durations
