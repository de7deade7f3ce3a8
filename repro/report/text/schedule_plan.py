"""A pipeline schedule with start and stop times, and its properties as JSON data and as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from repro.config import words
from repro.config.errors import ConfigError, require
from repro.config.sizes import ACTIONS, at_most
from repro.parallel.pipeline.schedule import Schedule, TimedAction, build_schedule, in_flight, timeline
from repro.util import units

SCHEDULE_TITLES = {"gpipe": "GPipe", "1f1b": "1F1B with flush", "interleaved": "Interleaved 1F1B"}
SCHEDULE_OPTIONS = {
    "schedule": "--schedule",
    "stages": "--pp",
    "micro_batches": "--micro-batches",
    "chunks": "--chunks",
}


@dataclass(frozen=True)
class TimedSchedule:
    """Pipeline schedule with start and stop times; `forward` and `backward`: relative times per micro-batch."""

    name: str
    stages: int
    micro_batches: int
    chunks: int
    forward: Fraction
    backward: Fraction
    schedule: Schedule
    slots: list[list[TimedAction]]

    @property
    def ideal(self) -> Fraction:
        """Computation time of a stage, m (t_f + t_b) for m micro-batches."""
        return self.micro_batches * (self.forward + self.backward)

    @property
    def total(self) -> Fraction:
        """Time from the start of the first pass to the end of the last pass of all stages."""
        return max(row[-1].stop for row in self.slots)

    @property
    def bubble(self) -> Fraction:
        """Bubble: idle time of the built schedule over the computation time of a stage (2104.04473 sec. 2.2)."""
        return self.total / self.ideal - 1

    @property
    def in_flight(self) -> list[int]:
        """Maximum number of pairs (micro-batch, chunk) whose activations a stage stores at once, for each stage."""
        return [in_flight(actions) for actions in self.schedule]

    @property
    def messages(self) -> int:
        """Number of tensors that stages send in each direction in one step, m (p v - 1); 0 with one stage."""
        return self.micro_batches * (self.stages * self.chunks - 1) if self.stages > 1 else 0

    @property
    def formula(self) -> str:
        """Closed form of the bubble with p stages, m micro-batches and v chunks (2104.04473 sec. 2.2)."""
        return "(p - 1) / (v m)" if self.chunks > 1 else "(p - 1) / m"

    @property
    def title(self) -> str:
        """Name of the schedule with its numbers of stages, micro-batches and chunks."""
        parts = [words.count_noun(self.stages, "stage"), words.count_noun(self.micro_batches, "micro-batch")]
        if self.chunks > 1:
            parts.append(f"{self.chunks} chunks per stage")
        return f"{SCHEDULE_TITLES[self.name]}: {', '.join(parts)}"


def make_schedule(
    name: str, stages: int, micro_batches: int, chunks: int = 1, forward: str = "1", backward: str = "2"
) -> TimedSchedule:
    """Return a pipeline schedule with times; an empty `name` selects `interleaved` for several chunks, else `1f1b`."""
    name = name or ("interleaved" if chunks > 1 else "1f1b")
    times = _parse_time("--forward", forward), _parse_time("--backward", backward)
    actions = 2 * stages * micro_batches * chunks
    at_most("2 x pp x micro-batches x chunks", actions, ACTIONS)
    try:
        schedule = build_schedule(name, stages, micro_batches, chunks)
    except ConfigError as error:
        raise error.for_key(SCHEDULE_OPTIONS[error.key]) from None
    return TimedSchedule(name, stages, micro_batches, chunks, *times, schedule, timeline(schedule, *times))


def schedule_document(plan: TimedSchedule) -> dict[str, Any]:
    """Return a pipeline schedule as JSON data, with times in the unit of `forward` and `backward`."""
    return {
        "schedule": plan.name,
        "stages": plan.stages,
        "micro_batches": plan.micro_batches,
        "chunks": plan.chunks,
        "forward": float(plan.forward),
        "backward": float(plan.backward),
        "bubble": {"fraction": str(plan.bubble), "value": float(plan.bubble), "formula": plan.formula},
        "idle_share": float(1 - plan.ideal / plan.total),
        "time": {"total": float(plan.total), "ideal": float(plan.ideal)},
        "in_flight": plan.in_flight,
        "activations": [float(Fraction(live, plan.stages * plan.chunks)) for live in plan.in_flight],
        "messages": {"forward": plan.messages, "backward": plan.messages},
        "actions": [
            [
                {
                    "kind": slot.action.kind,
                    "micro_batch": slot.action.micro_batch,
                    "chunk": slot.action.chunk,
                    "start": float(slot.start),
                    "stop": float(slot.stop),
                }
                for slot in row
            ]
            for row in plan.slots
        ],
    }


def schedule_facts(plan: TimedSchedule) -> list[tuple[str, str]]:
    """Return name and text of each property of a pipeline schedule that `repro schedule` prints."""
    idle = plan.total - plan.ideal
    return [
        ("schedule", f"{plan.title}  (p = {plan.stages}, m = {plan.micro_batches}, v = {plan.chunks})"),
        ("bubble", f"{format_share(plan.bubble)} of the ideal time; {plan.formula}"),
        ("idle", f"{format_share(idle / plan.total)} of the total time of every stage"),
        (
            "time",
            f"{format_number(plan.total)} = {plan.micro_batches} x ({format_number(plan.forward)} forward + "
            f"{format_number(plan.backward)} backward) + {format_number(idle)} idle",
        ),
        ("in flight", _in_flight(plan)),
        ("activations", _activations(plan)),
        ("messages", _messages(plan)),
    ]


def format_share(value: Fraction) -> str:
    """Return a fraction with its percentage, such as `37/480 = 7.7 %`; `none` for 0."""
    return f"{value} = {units.percent(float(value))}" if value else "none"


def format_number(value: Fraction | float) -> str:
    """Return a number as text of at most six digits: `33`, `28.5`, `1,551`."""
    return units.number(float(value), digits=6)


def _in_flight(plan: TimedSchedule) -> str:
    live = plan.in_flight
    what = "micro-batch" if plan.chunks == 1 else "(micro-batch, chunk) pair"
    if len(set(live)) == 1:
        where = "on every stage" if plan.stages > 1 else "on the stage"
        return f"{words.count_noun(live[0], what)} {where}"
    return f"{words.count_noun(live[0], what)} on stage 0, falling to {live[-1]} on stage {plan.stages - 1}"


def _activations(plan: TimedSchedule) -> str:
    """Return text on the maximum activations of a stage, in micro-batches of all layers, and those with GPipe."""
    most = max(plan.in_flight)
    parts = plan.stages * plan.chunks
    in_flight = Fraction(most, parts)
    through = words.count_noun(float(in_flight), "micro-batch")
    stored = words.count_noun(most, "micro-batch")
    volume = f"at most {stored} in 1/{parts} of the layers, as much as {through} in all layers"
    if plan.name == "gpipe":
        return volume
    other = Fraction(plan.micro_batches, plan.stages)
    return f"{volume}; GPipe: {format_number(other)}"


def _messages(plan: TimedSchedule) -> str:
    if not plan.messages:
        return "none"
    boundaries = plan.stages * plan.chunks - 1
    return (
        f"{2 * plan.messages:,} tensors per step between stages: {plan.micro_batches} x {boundaries} activations and "
        "as many gradients"
    )


def _parse_time(option: str, value: str) -> Fraction:
    """Return the positive number that an option's value states, as a fraction. Raises `ConfigError`."""
    expected = "a number greater than 0, such as 2, 1.5 or 3/2"
    require(re.fullmatch(r"\d{1,6}([./]\d{1,6})?", value) is not None, option, value, expected)
    numerator, _, denominator = value.partition("/")
    require(Fraction(numerator) > 0 and (not denominator or int(denominator) > 0), option, value, expected)
    return Fraction(value)
