"""A role's step as a program: the blocks, collectives and messages of each action of the pipeline schedule, in seconds.

Consecutive operators form one block, together with collectives that a rank waits for at once. The trace has few
micro-batches; the segment of an ordinary one stands for all that were not run. Items that nothing else can delay form a
run, which the stages time once: layers and micro-batches are alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from repro.parallel.ledger import SEND
from repro.parallel.pipeline.schedule import BACKWARD, Action
from repro.simulate.time.device import (
    ATTENTION,
    MATMULS,
    DeviceCost,
    in_any_lane,
    last_arrival_delay,
    maximum,
)
from repro.simulate.trace.events import HOST_WAIT, Message, Operator, Timed, Wait
from repro.simulate.trace.roles import TYPICAL_MICRO_BATCH, Trace

MATMUL, ATTENTION_KIND, OTHER, OPTIMIZER, HOST = "matmul", "attention", "elementwise", "optimizer", "host"
KINDS = (MATMUL, ATTENTION_KIND, OTHER, OPTIMIZER, HOST)
"""Kinds of a device's busy time; `host`: waiting for the host to issue the next operator."""


class OperatorBlock(NamedTuple):
    """Consecutive operators, and collectives that are awaited at once."""

    seconds: float
    parts: tuple[tuple[str, float], ...]
    """Seconds by kind; those of collectives by label."""


class Issue(NamedTuple):
    """Start of a collective, after the preceding items and the preceding collectives of its group."""

    key: tuple[object, ...]
    group: str
    label: str
    seconds: float
    late_s: float = 0.0
    """Delay of the group's last rank behind the mean of the ranks, in seconds."""


class Await(NamedTuple):
    """Wait for the oldest unfinished collective of `key`."""

    key: tuple[object, ...]


class Send(NamedTuple):
    """Send of a boundary tensor to the stage `offset` further."""

    offset: int
    channel: int
    payload: int


Item = OperatorBlock | Issue | Await | Send
CollectiveSeconds = Callable[[Message], float]
"""Seconds of a collective."""
MessageCount = Callable[[str, str], int]
"""Number of messages of a collective, by operation and group, that a rank's own thread begins and awaits."""


@dataclass
class StageProgram:
    """Program of the stages of one role."""

    segments: dict[Action, list[Item]] = field(default_factory=dict)
    """Items by action of the shortened schedule."""
    tail: list[Item] = field(default_factory=list)
    """Items after the last action: gradients, norm, optimizer, parameter all-gather."""
    micro_batches: int = 0
    """Number of micro-batches of the shortened schedule."""
    last: int = 0
    """Last micro-batch of the real step."""

    def items_of(self, action: Action) -> list[Item]:
        """Return the items of an action of the real schedule."""
        return self.segments[Action(action.kind, self.shown(action.micro_batch), action.chunk)]

    def shown(self, micro_batch: int) -> int:
        """Return the traced micro-batch that represents `micro_batch`; the first and the last represent themselves."""
        if self.last < self.micro_batches:
            return micro_batch
        if micro_batch == 0:
            return 0
        return self.micro_batches - 1 if micro_batch == self.last else TYPICAL_MICRO_BATCH


def label_of(message: Message) -> str:
    """Return the label of a message, for example `all-reduce of gradients (dp)`."""
    return f"{message.op.replace('_', '-')} of {message.purpose} ({message.group})"


def compile_program(
    traced: Trace,
    whole: int,
    cost: DeviceCost,
    seconds: CollectiveSeconds,
    messages: MessageCount,
    *,
    captured: bool = False,
) -> StageProgram:
    """Return the program of a trace. `whole` is the number of micro-batches of the step, of which a trace has a few.

    `captured`: the host launches each pass of a micro-batch as one CUDA graph, so its operators cost no host time.
    """
    micro_batches = traced.layout.accumulation
    found = StageProgram(micro_batches=micro_batches, last=whole - 1)
    compiler = _ProgramCompiler(cost, seconds, traced.keys, traced.role.stage, messages)
    shown = {found.shown(micro_batch) for micro_batch in range(whole)}
    for action, piece in zip(traced.actions, traced.pieces[:-1], strict=True):
        if action.micro_batch in shown:
            host_s = cost.backward_s if action.kind == BACKWARD else cost.operator_s
            found.segments[action] = compiler.items(piece, host_s=0.0 if captured else host_s)
    found.tail = compiler.items(traced.pieces[-1], tail=True)
    return found


class _ProgramCompiler:
    """Compiler of events into items."""

    def __init__(
        self,
        cost: DeviceCost,
        seconds: CollectiveSeconds,
        keys: dict[int, tuple[object, ...]],
        stage: int,
        messages: MessageCount,
    ):
        self.cost, self.seconds, self.keys, self.stage = cost, seconds, keys, stage
        self.messages = messages
        self._jitter, self._own = in_any_lane(cost.jitter_s > 0), in_any_lane(cost.message_s > 0)

    def items(
        self, events: Sequence[Timed], *, host_s: float | None = None, tail: bool = False
    ) -> list[Item]:
        """Return the items of a piece; with `tail`, its operators are the optimizer's.

        `host_s`: host time of an operator of the piece in seconds; by default that of the forward pass or of the
        optimizer. The host runs ahead of the device inside a block.
        """
        if host_s is None:
            host_s = self.cost.launch_s if tail else self.cost.operator_s
        found: list[Item] = []
        parts: dict[str, float] = {}
        host = device = apart = 0.0
        """`apart`: compute seconds after the last wait for other ranks."""

        def close() -> None:
            nonlocal host, device
            if parts:
                late = maximum(0.0, host - device)
                if in_any_lane(late > 0):
                    parts[HOST] = parts.get(HOST, 0.0) + late
                found.append(OperatorBlock(device + late, tuple(parts.items())))
                parts.clear()
            host = device = 0.0

        at = 0
        while at < len(events):
            event = events[at]
            at += 1
            if isinstance(event, Operator):
                if event.name == HOST_WAIT:
                    close()
                    continue
                took = self.cost.seconds(event)
                kind = OPTIMIZER if tail else kind_of(event)
                parts[kind] = parts.get(kind, 0.0) + took
                device += took
                apart += took
                # Repeated views and copies are no operators of a layer, and each takes the host as long as any.
                host += host_s if event.calls == 1 else self.cost.launch_s * event.calls
            elif isinstance(event, Message):
                if self._own:
                    own = self._own_seconds(event)
                    parts[HOST] = parts.get(HOST, 0.0) + own
                    device += own
                    apart += own
                if event.op == SEND:
                    close()
                    found.append(Send(event.peer - self.stage, event.channel, event.payload))
                    continue
                took, label = self.seconds(event), label_of(event)
                if at < len(events) and events[at] == Wait(event.work) and event.group == "tp":
                    at += 1
                    took = took + self._late(event, apart)  # `took` may be an array in a cache
                    apart = 0.0
                    parts[label] = parts.get(label, 0.0) + took
                    device += took
                    host += host_s
                    continue
                close()
                late = self._late(event, apart)
                found.append(Issue(self.keys[event.work], event.group, label, took, late))
            elif event.work in self.keys:  # waits for messages between stages follow from the schedule
                close()
                apart = 0.0
                found.append(Await(self.keys[event.work]))
        close()
        return found

    def _own_seconds(self, message: Message) -> float:
        """Return the compute thread's seconds for a message; between stages, there is a receive for each send."""
        if message.op == SEND:
            return 2 * self.cost.message_s
        count = self.messages(message.op, message.group)
        exchanged = count > 1 and in_any_lane(self.cost.exchange_s > 0)
        return count * self.cost.exchange_s if exchanged else self.cost.message_s

    def _late(self, message: Message, seconds: float) -> float:
        """Return the delay of the group's last rank, `seconds` of operators after its ranks were synchronous."""
        return last_arrival_delay(self.cost.jitter_s, seconds, message.size) if self._jitter else 0.0


def kind_of(operator: Operator) -> str:
    """Return the kind of a device's seconds on `operator`."""
    if operator.name in MATMULS:
        return MATMUL
    return ATTENTION_KIND if operator.name.startswith(ATTENTION) else OTHER


INNER_GROUP = "tp"
"""The group whose collectives begin and end within a layer."""


def split_into_runs(items: Sequence[Item]) -> Iterator[tuple[bool, list[Item]]]:
    """Yield `items` in order, cut into undelayed runs (True) and other items (False)."""
    matched = _matched_positions(items)
    part: list[Item] = []
    open_, whole = 0, 0
    for at, item in enumerate(items):
        if not isinstance(item, OperatorBlock) and at not in matched:
            yield True, part[:whole]
            yield False, [*part[whole:], item]
            part, open_, whole = [], 0, 0
            continue
        part.append(item)
        open_ += isinstance(item, Issue) - isinstance(item, Await)
        if open_ == 0:
            whole = len(part)
    yield True, part[:whole]
    yield False, part[whole:]


def _matched_positions(items: Sequence[Item]) -> set[int]:
    """Return the positions of the inner group's collectives that `items` both issue and await, and of the awaits."""
    under_way: dict[tuple[object, ...], list[int]] = defaultdict(list)
    leaving = Counter(item.key for item in items if isinstance(item, Issue) and item.group == INNER_GROUP)
    leaving.subtract(item.key for item in items if isinstance(item, Await))
    found: set[int] = set()
    for at, item in enumerate(items):
        if isinstance(item, Issue) and item.group == INNER_GROUP and not leaving[item.key]:
            under_way[item.key].append(at)
        elif isinstance(item, Await) and under_way[item.key]:
            found |= {under_way[item.key].pop(0), at}
    return found
