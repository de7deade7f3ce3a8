"""Conversion of a pipeline stage's trace to a program of timed items: operator blocks, collectives and messages.

An action is a forward or backward pass of one micro-batch. One traced micro-batch stands for all that were not traced.
Items that no other item can delay form a run (`split_into_runs`), whose duration is computed once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from repro.parallel.ledger import SEND
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD, Action
from repro.simulate.time.device import (
    ATTENTION,
    MATMULS,
    DeviceCost,
    first_lane,
    in_any_lane,
    last_arrival_delay,
    maximum,
)
from repro.simulate.time.outlines import EventOutlines, Stretch, outlines_of
from repro.simulate.trace.events import Message, Operator, Wait
from repro.simulate.trace.roles import TYPICAL_MICRO_BATCH, Trace

MATMUL, ATTENTION_KIND, OTHER, OPTIMIZER, HOST = "matmul", "attention", "elementwise", "optimizer", "host"
KINDS = (MATMUL, ATTENTION_KIND, OTHER, OPTIMIZER, HOST)
"""Kinds of a device's busy time. `host` is time in which the device waits for the host to issue operators."""


COMPUTE = "compute"
"""Name of the stream on which a stage runs its operators."""


class OperatorBlock(NamedTuple):
    """Block of consecutive operators, and of collectives for which the compute stream waits immediately."""

    seconds: float
    parts: tuple[tuple[str, float], ...]
    """Seconds of each kind of operator (`KINDS`) and of each kind of collective, at the best values of the inputs."""
    kernels: tuple[tuple[str, str, float], ...] = ()
    """Stream, name and seconds of each operator and collective in order; empty unless a drawing needs them."""


class Issue(NamedTuple):
    """Start of a collective, which runs after all preceding collectives of its process group."""

    key: tuple[object, ...]
    group: str
    label: str
    seconds: float
    late_s: float = 0.0
    """Mean delay in seconds of the process group's last rank behind the mean of all its ranks."""


class Await(NamedTuple):
    """Wait of the compute stream for the oldest unfinished collective with this key (see `Trace.keys`)."""

    key: tuple[object, ...]


class Send(NamedTuple):
    """Send of activations or gradients to the pipeline stage whose index is larger by `offset`."""

    offset: int
    channel: int
    payload: int


GROUPS_ACROSS_STAGES = ("world", "pp", "embedding")
"""Names of the process groups whose members are on different pipeline stages."""
Item = OperatorBlock | Issue | Await | Send
CollectiveSeconds = Callable[[Message], float]
"""Function that returns the seconds of a collective."""
MessageCount = Callable[[str, str], int]
"""Function that returns how many messages of a collective a rank's compute thread handles (`Network.messages`)."""


@dataclass
class StageProgram:
    """Timed operators, collectives and messages of a step, for the pipeline stages of one role."""

    segments: dict[Action, list[Item]] = field(default_factory=dict)
    """Timed operators, collectives and messages of each action (a forward or backward pass) that the trace ran."""
    tail: list[Item] = field(default_factory=list)
    """Timed items after the last backward pass: remaining gradient reductions, norm, optimizer, parameter gather."""
    micro_batches: int = 0
    """Number of micro-batches that the trace ran."""

    def items_of(self, action: Action, last: int) -> list[Item]:
        """Return the timed operators and messages of an action (a pass) in a step of `last` + 1 micro-batches."""
        return self.segments[Action(action.kind, self.shown(action.micro_batch, last), action.chunk)]

    def shown(self, micro_batch: int, last: int) -> int:
        """Return the index of the traced micro-batch that represents `micro_batch` among `last` + 1 micro-batches."""
        if last < self.micro_batches:
            return micro_batch
        if micro_batch == 0:
            return 0
        return self.micro_batches - 1 if micro_batch == last else TYPICAL_MICRO_BATCH


def label_of(message: Message) -> str:
    """Return the label of a collective, for example `all-reduce of gradients (dp)`."""
    return f"{message.op.replace('_', '-')} of {message.purpose} ({message.group})"


def compile_program(
    traced: Trace,
    micro_batches: int,
    cost: DeviceCost,
    seconds: CollectiveSeconds,
    messages: MessageCount,
    *,
    captured: bool = False,
    record: bool = False,
) -> StageProgram:
    """Return the timed operators, collectives and messages of a trace.

    `micro_batches`: number of the real step. `captured`: whether the host launches each pass of a micro-batch as one
    CUDA graph, so that operators cost no host time. `record`: store the kernels of each block, for a drawing.
    """
    found = StageProgram(micro_batches=traced.layout.accumulation)
    outlines = outlines_of(traced)
    compiler = ProgramCompiler(
        cost, seconds, traced.keys, traced.role.stage, messages, outlines, captured=captured, record=record
    )
    shown = {found.shown(number, micro_batches - 1) for number in range(micro_batches)}
    for place, action in enumerate(traced.actions):
        if action.micro_batch in shown:
            found.segments[action] = compiler.timed(outlines.of_piece(traced, place), action.kind)
    found.tail = compiler.timed(outlines.of_piece(traced, -1), OPTIMIZER)
    return found


class _SequenceTime(NamedTuple):
    """Device time and host time of a sequence of operators, in seconds."""

    device: float
    host: float
    parts: tuple[tuple[str, float], ...]
    """Device seconds for each kind of operator (`KINDS`), at the best values of uncertain inputs."""


class ProgramCompiler:
    """Converter of a trace's operators and messages to timed items (operator blocks, collectives, messages, waits)."""

    def __init__(
        self,
        cost: DeviceCost,
        seconds: CollectiveSeconds,
        keys: dict[int, tuple[object, ...]],
        stage: int,
        messages: MessageCount,
        outlines: EventOutlines,
        *,
        captured: bool = False,
        record: bool = False,
    ):
        self.record = record
        self.cost, self.seconds, self.keys, self.stage = cost, seconds, keys, stage
        self.messages, self.outlines = messages, outlines
        self.host_s = {
            FORWARD: 0.0 if captured else cost.operator_s,
            BACKWARD: 0.0 if captured else cost.backward_s,
            OPTIMIZER: cost.launch_s,
        }
        """Seconds in which the host issues one operator, by phase of the step."""
        self._jitter, self._own = in_any_lane(cost.jitter_s > 0), in_any_lane(cost.message_s > 0)
        self._sequences: dict[tuple[int, str], _SequenceTime] = {}
        self._blocks: dict[tuple[tuple[int | Message, ...], str], OperatorBlock | None] = {}
        self._apart = 0.0
        """Seconds of compute since the ranks last waited for a collective, in which their times drift apart."""

    def timed(self, stretches: Sequence[Stretch], phase: str = FORWARD) -> list[Item]:
        """Return the timed operators and messages of parts of a trace in one phase: FORWARD, BACKWARD or OPTIMIZER."""
        found: list[Item] = []
        self._apart = 0.0
        for entries, last in stretches:
            block = self._block(entries, last, phase)
            if block is not None:
                found.append(block)
            if isinstance(last, Wait):
                self._apart = 0.0
                found.append(Await(self.keys[last.work]))
            elif last is not None and last.op == SEND:
                found.append(Send(last.peer - self.stage, last.channel, last.payload))
            elif last is not None:
                late = self._late(last)
                found.append(
                    Issue(self.keys[last.work], last.group, label_of(last), self.seconds(last), late)
                )
        return found

    def _block(
        self, entries: tuple[int | Message, ...], last: Message | Wait | None, phase: str
    ) -> OperatorBlock | None:
        """Return a timed block of operators and collectives (`entries`) and the start of message `last`, or None."""
        if self._own or self._jitter:
            return self._new_block(entries, last if isinstance(last, Message) else None, phase)
        key = entries, phase
        if key not in self._blocks:
            self._blocks[key] = self._new_block(entries, None, phase)
        return self._blocks[key]

    def _new_block(
        self, entries: tuple[int | Message, ...], last: Message | None, phase: str
    ) -> OperatorBlock | None:
        parts: dict[str, float] = {}
        kernels: list[tuple[str, str, float]] = []
        host = device = 0.0

        def add(kind: str, seconds: float, stream: str = COMPUTE) -> None:
            parts[kind] = parts.get(kind, 0.0) + first_lane(seconds)
            if self.record:
                kernels.append((stream, kind, first_lane(seconds)))

        for entry in (*entries, last) if self._own and last is not None else entries:
            if isinstance(entry, int):
                sequence = self._sequence(entry, phase)
                device += sequence.device
                host += sequence.host
                if self._jitter:
                    self._apart += sequence.device
                for kind, seconds in sequence.parts:
                    parts[kind] = parts.get(kind, 0.0) + seconds
                if self.record:
                    ordered = self.outlines.ordered(entry)
                    kernels += [(COMPUTE, one.name, first_lane(self.cost.seconds(one))) for one in ordered]
                continue
            if self._own:
                own = self._own_seconds(entry)
                add(HOST, own)
                device += own
                self._apart += own
            if entry is not last:
                took = self.seconds(entry) + self._late(entry)
                self._apart = 0.0
                add(label_of(entry), took, entry.group)
                device += took
                host += self.host_s[phase]
        if not parts:
            return None
        late = maximum(0.0, host - device)
        if first_lane(late) > 0:
            add(HOST, late)
        return OperatorBlock(device + late, tuple(parts.items()), tuple(kernels))

    def _sequence(self, number: int, phase: str) -> _SequenceTime:
        """Return the device time and host time of the operator sequence of index `number` in a phase of the step."""
        found = self._sequences.get((number, phase))
        if found is None:
            parts: dict[str, float] = {}
            host = device = 0.0
            for operator, times in self.outlines.sequences[number].items():
                kind = OPTIMIZER if phase == OPTIMIZER else kind_of(operator)
                seconds = times * self.cost.seconds(operator)
                device += seconds
                parts[kind] = parts.get(kind, 0.0) + first_lane(seconds)
                # An operator that stands for several calls (views, copies) occurs only outside of transformer layers.
                # It needs one launch time of the host for each of these calls.
                calls = operator.calls
                host += times * (self.host_s[phase] if calls == 1 else self.cost.launch_s * calls)
            found = _SequenceTime(device, host, tuple(parts.items()))
            self._sequences[number, phase] = found
        return found

    def _own_seconds(self, message: Message) -> float:
        """Return the compute thread's seconds for a collective or message; those of a send include its receive."""
        if message.op == SEND:
            return 2 * self.cost.message_s
        count = self.messages(message.op, message.group)
        exchanged = count > 1 and in_any_lane(self.cost.exchange_s > 0)
        return count * self.cost.exchange_s if exchanged else self.cost.message_s

    def _late(self, message: Message) -> float:
        """Return the mean delay of a group's last rank at a collective, in seconds; it grows with preceding compute."""
        return last_arrival_delay(self.cost.jitter_s, self._apart, message.size) if self._jitter else 0.0


def kind_of(operator: Operator) -> str:
    """Return the kind (one of `KINDS`) to which the device time of `operator` belongs."""
    if operator.name in MATMULS:
        return MATMUL
    return ATTENTION_KIND if operator.name.startswith(ATTENTION) else OTHER


def split_into_runs(items: Sequence[Item]) -> Iterator[tuple[bool, list[Item]]]:
    """Split timed operators and messages into undelayed runs (yielded with True) and others (yielded with False).

    A run awaits all its collectives, has no message or collective between stages, and is delayed by no other item.
    """
    matched = _matched_positions(items)
    part: list[Item] = []
    open_, complete = 0, 0
    for at, item in enumerate(items):
        if not isinstance(item, OperatorBlock) and at not in matched:
            yield True, part[:complete]
            yield False, [*part[complete:], item]
            part, open_, complete = [], 0, 0
            continue
        part.append(item)
        open_ += isinstance(item, Issue) - isinstance(item, Await)
        if open_ == 0:
            complete = len(part)
    yield True, part[:complete]
    yield False, part[complete:]


def _matched_positions(items: Sequence[Item]) -> set[int]:
    """Return the positions of collectives that start and end within `items` and within a stage, and of their waits."""
    under_way: dict[tuple[object, ...], list[int]] = defaultdict(list)
    leaving = Counter(
        item.key for item in items if isinstance(item, Issue) and item.group not in GROUPS_ACROSS_STAGES
    )
    leaving.subtract(item.key for item in items if isinstance(item, Await))
    found: set[int] = set()
    for at, item in enumerate(items):
        if isinstance(item, Issue) and not leaving[item.key]:
            under_way[item.key].append(at)
        elif isinstance(item, Await) and under_way[item.key]:
            found |= {under_way[item.key].pop(0), at}
    return found
