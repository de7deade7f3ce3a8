"""Breakdown of a pipeline stage's step time, busy intervals of its streams, and their export as a Chrome trace."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from repro.simulate.time.device import first_lane
from repro.simulate.time.program import COMPUTE, KINDS, Issue, OperatorBlock
from repro.simulate.trace.events import HOST_COPY

STAGE_SEND = "send between stages (pp)"


@dataclass
class StageTime:
    """Breakdown of one pipeline stage's step time in seconds, at the best values of all uncertain inputs."""

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Busy seconds of the compute stream, by kind of operator."""
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which compute waits for communication, by label of the collective or message."""
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of all communication, hidden or exposed, by label of the collective or message."""
    bubble: float = 0.0
    """Seconds in which the stage waits for compute of other pipeline stages."""
    by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of all forward passes, of all backward passes, and of the update, including waits."""

    def add(self, other: StageTime, times: int) -> None:
        """Add the breakdown `other`, multiplied by `times`, to this breakdown."""
        self.bubble += times * other.bubble
        for mine, more in zip(self._tables, other._tables, strict=True):
            for name, seconds in more.items():
                mine[name] += times * seconds

    def copy(self) -> StageTime:
        """Return a copy of the stage's time breakdown."""
        found = StageTime()
        found.add(self, 1)
        return found

    @property
    def _tables(self) -> tuple[dict[str, float], ...]:
        return self.busy, self.exposed, self.communication, self.by_phase

    def phase(self, name: str, began: float, now: float) -> None:
        """Add the seconds from `began` to `now` to the phase `name`: forward passes, backward passes or update."""
        self.by_phase[name] += first_lane(now) - first_lane(began)

    def computed(self, block: OperatorBlock, seconds: float, took: float) -> None:
        """Add a block of operators to the busy time.

        `took`: actual seconds of the block. `seconds`: seconds of the block if all stages computed on shared CPU cores.
        """
        slowed = first_lane(seconds)
        part_of = 1.0 if took is seconds or not slowed else first_lane(took) / slowed
        for kind, part in block.parts:
            if kind in KINDS:
                self.busy[kind] += part * part_of
            else:
                self.communication[kind] += part * part_of
                self.exposed[kind] += part * part_of
        if slowed > (alone := first_lane(block.seconds)):
            self.busy["overlap"] += (slowed - alone) * part_of

    def begun(self, label: str, seconds: float) -> None:
        """Add the seconds of a collective or a message, which begins, to the communication time."""
        self.communication[label] += first_lane(seconds)

    def received(self, start: float, end: float) -> None:
        """Add the transfer of another pipeline stage's message, from `start` to `end`, to the communication time."""
        self.communication[STAGE_SEND] += first_lane(end) - first_lane(start)

    def waited_for_message(self, now: float, start: float, end: float) -> None:
        """Add a wait from `now` to the `end` of a message's transfer; the wait until its `start` is pipeline bubble."""
        now = first_lane(now)
        delay, waited = max(0.0, first_lane(end) - now), max(0.0, first_lane(start) - now)
        self.bubble += waited
        self.exposed[STAGE_SEND] += delay - waited

    def waited_for(self, issue: Issue, now: float, end: float, *, across: bool) -> None:
        """Add a wait for a collective. `across`: the collective spans stages; a wait beyond its duration is bubble."""
        delay = max(0.0, first_lane(end) - first_lane(now))
        exposed = min(delay, first_lane(issue.seconds)) if across else delay
        self.exposed[issue.label] += exposed
        self.bubble += delay - exposed


@dataclass(frozen=True)
class Span:
    """Time interval in which a stream of a pipeline stage is busy."""

    stage: int
    stream: str
    """Stream of the interval: `COMPUTE`, or the name of a process group."""
    name: str
    """Name of the action that the stage computes, such as `forward 3`, or label of a collective or message."""
    start: float
    """Start in seconds."""
    seconds: float
    block: OperatorBlock | None = None
    """Operators that run in the interval; None for a collective or message."""

    @property
    def stop(self) -> float:
        """End of the interval."""
        return self.start + self.seconds

    def kernels(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield stream, name, start and seconds of each kernel of the busy interval, scaled to fill the interval."""
        if self.block is None:
            yield self.stream, self.name, self.start, self.seconds
            return
        start, slower = self.start, self.seconds / first_lane(self.block.seconds)
        for stream, name, seconds in self.block.kernels:
            if seconds > 0:
                yield stream, name, start, seconds * slower
                start += seconds * slower


MICROSECONDS = 1e6
PROFILER_NAMES = {
    HOST_COPY: "aten::copy_",
    "all-gather": "nccl:_all_gather_base",
    "reduce-scatter": "nccl:_reduce_scatter_base",
    "send": "nccl:recv",
}
"""Names that `torch.profiler` gives operators and messages, if they differ from the general rule (`profiler_name`)."""


def profiler_name(name: str) -> str:
    """Return the name that `torch.profiler` gives an operator (`aten::mm`) or a collective (`nccl:all_reduce`)."""
    collective, is_message, _ = name.rpartition(" (")[0].replace(" between ", " of ").partition(" of ")
    if is_message:
        return PROFILER_NAMES.get(collective, f"nccl:{collective.replace('-', '_')}")
    return PROFILER_NAMES.get(name, name.replace(".", "::", 1))


def trace_events(spans: Sequence[Span], stages: Collection[int]) -> Iterator[dict[str, Any]]:
    """Yield the Chrome trace events of the pipeline stages `stages`, in microseconds from the start of the step.

    A stage is a process and a stream is a thread. As in traces of `torch.profiler`, kernels have the names of their
    operators, and an annotation encloses each forward pass, backward pass and update.
    """
    shown = [span for span in spans if span.stage in stages]
    began = min((span.start for span in shown), default=0.0)
    rows: dict[tuple[int, str], int] = {}

    def event(
        stage: int, stream: str, name: str, start: float, seconds: float, **more: Any
    ) -> dict[str, Any]:
        row = rows.setdefault((stage, stream), len(rows))
        times = {"ts": (start - began) * MICROSECONDS, "dur": seconds * MICROSECONDS}
        return {"ph": "X", "pid": stage, "tid": row, "name": name, **times, **more}

    computed = (span for span in shown if span.stream == COMPUTE)
    for (stage, name), group in groupby(computed, lambda span: (span.stage, span.name)):
        parts = list(group)
        took = parts[-1].stop - parts[0].start
        yield event(stage, COMPUTE, name, parts[0].start, took, cat="gpu_user_annotation")
    for span in shown:
        for stream, name, start, seconds in span.kernels():
            more = {"cat": "kernel", "args": {"label": name}}
            yield event(span.stage, stream, profiler_name(name), start, seconds, **more)
    for stage in sorted(stages):
        yield {"ph": "M", "pid": stage, "name": "process_name", "args": {"name": f"stage {stage}"}}
    for (stage, stream), row in rows.items():
        yield {"ph": "M", "pid": stage, "tid": row, "name": "thread_name", "args": {"name": stream}}


def write_chrome_trace(path: Path, spans: Sequence[Span], stages: Collection[int]) -> None:
    """Write the busy intervals of the pipeline stages `stages` as a Chrome trace to the file `path`."""
    document = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(spans, stages))}
    path.write_text(json.dumps(document), encoding="utf-8")
