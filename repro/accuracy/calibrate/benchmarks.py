"""Benchmarks that a rank runs in a calibration: collectives by payload, compute during a collective, training steps.

Steps are timed because an operator is slower in a step than alone: other operators and ranks use caches and cores.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from repro.accuracy.calibrate.clock import OperatorClock, timing
from repro.accuracy.calibrate.plan import GroupKind
from repro.config import Experiment, Layout, Model
from repro.config.enums import Phase
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.measure.memory import MemoryTracker
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel.comm import MAX, Group
from repro.parallel.transports import NoTransport, Work
from repro.simulate.trace.events import Operator, PhaseStart
from repro.simulate.trace.roles import roles, trace
from repro.util import processes

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
OVERLAPPED = ("all_reduce", "reduce_scatter", "all_gather")
SMALL, MANY = 2**20, 3
"""Payload, in bytes, up to which messages take mainly latency, and factor by which these are measured more often."""
PRODUCT_SIZE = {"cpu": 512, "cuda": 4096}
LONGER = 1.5
"""Ratio of the duration of the compute that runs during a collective to the duration of the collective."""


class LinkBench:
    """Benchmark of messages and collectives, in which all groups of a kind (such as tp groups) communicate at once."""

    def __init__(self, clock: OperatorClock, largest: int):
        """Allocate two buffers of `largest` bytes; every measured message is a part of one of these buffers."""
        self.clock = clock
        world = clock.group.size
        count = max(1, largest // 4 // world) * world
        # The buffers contain zeros, because repeated all-reduces of other numbers would overflow.
        self._one, self._other = (torch.zeros(count, device=clock.device) for _ in range(2))

    def by_payload(
        self,
        kinds: Mapping[GroupKind, Group],
        pipelines: Mapping[str, Group],
        payloads: Sequence[int],
        beat: Callable[[], None],
        collectives: Sequence[str] = COLLECTIVES,
    ) -> list[dict[str, Any]]:
        """Return durations by payload: a row for each collective and kind of group (such as tp groups), and for sends.

        A row has `op`, `place` (inside or between nodes), sizes of the groups, and `points` (payload in bytes, timing).
        Measurements of all rows alternate, so that a disturbance affects few of each. `beat` reports progress.
        """
        rows: list[dict[str, Any]] = []
        runs: dict[tuple[int, int], Callable[[], None]] = {}
        for kind, group in kinds.items():
            for op in collectives:
                runs |= {(len(rows), payload): self._run(op, payload, group) for payload in payloads}
                rows.append({"op": op, "place": kind.place, **kind._asdict(), "points": []})
        for place, pipeline in pipelines.items():
            runs |= {(len(rows), payload): self._messages(payload, pipeline) for payload in payloads}
            rows.append({"op": "send", "place": place, "points": []})
        seconds: dict[tuple[int, int], list[float]] = {key: [] for key in runs}
        for run in runs.values():
            run()
        for turn in range(MANY * self.clock.repeats):
            for (row, payload), run in runs.items():
                if payload > SMALL and turn >= self.clock.repeats:
                    continue
                # A send is measured as a message and its reply, so that one message takes half of the measured seconds.
                ways = 2 if rows[row]["op"] == "send" else 1
                seconds[row, payload].append(self._seconds(run, payload) / ways)
                beat()
        for (row, payload), sample in seconds.items():
            rows[row]["points"].append((payload, timing(sample)))
        return rows

    def overlap_cost(self, op: str, payload: int, group: Group, beat: Callable[[], None]) -> float:
        """Return the seconds that matrix products lose per second of a concurrent collective, between 0 and 1.

        `beat` reports the progress of the rank after each repeat.
        """
        start = self._start(op, payload, group)
        kind = self.clock.device.type
        dtype = torch.float16 if kind == "cuda" else torch.float32
        size = PRODUCT_SIZE[kind]
        x = torch.full((size, size), 1.0 / size, dtype=dtype, device=self.clock.device)

        def products(count: int) -> None:
            y: Tensor = x
            for _ in range(count):
                y = x @ y

        def both() -> None:
            work = start()
            products(count)
            work.wait()

        def alone() -> None:
            start().wait()

        alone()
        products(1)
        rounds = range(self.clock.repeats)
        communication = self._slowest([self._seconds(alone, payload) for _ in rounds])
        one = self._slowest([self._seconds(lambda: products(1), payload) for _ in rounds])
        count = max(1, math.ceil(LONGER * communication / one))
        lost = []
        for _ in rounds:
            lost.append(-self._seconds(lambda: products(count), payload) + self._seconds(both, payload))
            beat()
        return min(1.0, max(0.0, median(lost) / communication))

    def message_s(self, op: str, group: Group) -> float:
        """Return this thread's processor time per collective, in seconds, times the number of ranks per core."""
        run = self._run(op, 4 * group.size, group)
        run()
        found = []
        for _ in range(MANY * self.clock.repeats):
            self.clock.flush()
            group.barrier()
            began = time.thread_time()
            run()
            found.append(time.thread_time() - began)
        return median(found) * self.clock.ranks_per_core

    def _start(self, op: str, payload: int, group: Group) -> Callable[[], Work]:
        """Return a function that starts the collective `op` with a payload of `payload` bytes."""
        part = max(1, payload // 4 // group.size)
        full, mine = self._one[: part * group.size], self._other[:part]
        starts: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: group.all_reduce(full),
            "reduce_scatter": lambda: group.reduce_scatter(mine, full),
            "all_gather": lambda: group.all_gather(full, mine),
            "broadcast": lambda: group.broadcast(full, 0),
        }
        return starts[op]

    def _run(self, op: str, payload: int, group: Group) -> Callable[[], None]:
        """Return a function that starts the collective `op` and waits for its end."""
        start = self._start(op, payload, group)
        return lambda: start().wait()

    def _messages(self, payload: int, pipeline: Group) -> Callable[[], None]:
        """Return a function with which two neighbouring ranks of a pipeline group exchange messages of given size."""
        message, back = (buffer[: max(1, payload // 4)] for buffer in (self._one, self._other))
        first = pipeline.rank % 2 == 0
        peer = pipeline.rank + (1 if first else -1)

        def there_and_back() -> None:
            if peer >= pipeline.size:
                return
            if first:
                work = pipeline.send(message, peer, 0)
                pipeline.receive(back, peer, 1).wait()
            else:
                pipeline.receive(back, peer, 0).wait()
                work = pipeline.send(message, peer, 1)
            work.wait()

        return there_and_back

    def _seconds(self, run: Callable[[], None], payload: int) -> float:
        """Return the mean duration of a call of `run`, in seconds, which all ranks start together after a barrier.

        Small payloads are measured over several calls. The payload alone determines the number of calls on all ranks.
        """
        calls = 5 if payload <= 2**16 else 2 if payload <= SMALL else 1
        self.clock.flush()
        self.clock.synchronize()
        self.clock.group.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        self.clock.synchronize()
        return (time.perf_counter() - began) / calls

    def _slowest(self, seconds: Sequence[float]) -> float:
        """Return the maximum over all ranks of each rank's median of `seconds`."""
        shared = torch.tensor(median(seconds), device=self.clock.device)
        self.clock.group.all_reduce(shared, MAX).wait()
        return float(shared)


WIDTH, LAYERS = 8, 4
"""Width and number of layers of a model so small that host overhead per operator determines its step time."""
TIMED_STEPS = 3
"""Number of training steps that a rank times, after one warm-up step."""


class LaunchBench:
    """Benchmark of host overhead: training steps of a tiny model without communication, on all ranks at once."""

    def __init__(self, clock: OperatorClock, like: Experiment):
        self.clock = clock
        model = Model(name="launch", layers=LAYERS, hidden=WIDTH, heads=1, vocab=2 * WIDTH, seq=WIDTH)
        layout = Layout(precision=like.layout.precision)
        experiment = replace(like, model=model, layout=layout, training=replace(like.training, dropout=0.0))
        traced = trace(experiment, roles(experiment)[0])
        calls = (o for times, o in traced.operators() for _ in range(times))
        self._operators = [(o.name, o.read + o.written, o.flops) for o in calls]
        self._engine = NativeEngine(experiment, meshes.single_rank_mesh(), clock.device)
        tokens = torch.zeros(1, WIDTH, dtype=torch.int64, device=clock.device)
        self._batches = [MicroBatch(tokens, tokens, BatchPosition(0, 0))]
        self._seconds: list[float] = []
        self._backward_s: list[float] = []
        """Duration of the backward pass in each step of the tiny model, in seconds."""
        self._backward_operators = 0
        is_backward = False
        for event in traced.step:
            if isinstance(event, PhaseStart):
                is_backward = event.name == Phase.BACKWARD
            self._backward_operators += is_backward and isinstance(event, Operator)
        for _ in range(2):
            self._step()

    def sample(self) -> None:
        """Time a step of the tiny model; called throughout the calibration, so that a disturbance affects few calls."""
        self._step()  # untimed: it reloads code that other benchmarks removed from the processor's caches
        self.clock.synchronize()
        self.clock.group.barrier()
        self._seconds.append(self.clock.in_a_crowd(lambda i: self._step(), self._step))

    def result(self) -> dict[str, Any]:
        """Return operators and timing of a step of the tiny model, and number and time of its backward operators.

        `operators` has name, bytes and FLOP of each operator. On a GPU, times are those of the host for enqueueing.
        """
        return {
            "operators": self._operators,
            **timing(self._seconds)._asdict(),
            "backward_operators": self._backward_operators,
            "backward_s": median(self._backward_s),
        }

    def _step(self) -> float:
        marks: list[tuple[str, float]] = []
        began = time.perf_counter()
        self._engine.step(self._batches, lambda phase: marks.append((phase, time.perf_counter())))
        self._engine.synchronize()
        spans = ((phase, end - start) for (phase, start), (_, end) in pairwise(marks))
        self._backward_s.append(sum(seconds for phase, seconds in spans if phase == Phase.BACKWARD))
        return time.perf_counter() - began


class SilentTransport(NoTransport):
    """Transport without communication, which fills received tensors with 0.5, since denormal floats slow operators."""

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        output.view(-1, input.numel()).copy_(input.clone())  # a copy, since `input` may be a view of `output`
        return Work()

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        tensor.fill_(0.5)
        return Work()


def time_silent_step(
    experiment: Experiment, clock: OperatorClock, beat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Time training steps of the first pipeline stage of `experiment` without communication, on all ranks at once.

    Returns `operators` (name, bytes, FLOP, calls), the mean `seconds` of a step, and `between`: the compute seconds
    between two omitted messages. Processor seconds are multiplied by the ranks per core. `beat` reports progress.
    """
    traced = trace(experiment, roles(experiment)[0], gloo=True)
    short = replace(experiment, layout=traced.layout)
    mesh = meshes.build_mesh(traced.layout, 0, lambda ranks: SilentTransport())
    tracker = MemoryTracker()
    with tracker:
        engine = NativeEngine(short, mesh, clock.device)
    shape = traced.layout.micro_batch, experiment.seq
    tokens = torch.randint(experiment.model.vocab, shape, device=clock.device)
    batches = [MicroBatch(tokens, tokens, BatchPosition(0, 0))] * traced.layout.accumulation
    marks: list[float] = []
    mesh.ledger.observers.append(lambda *_: marks.append(time.thread_time()))
    mesh.ledger.observers.append(lambda *_: beat())
    spent, between = [], []
    for turn in range(1 + TIMED_STEPS):
        if turn == 1:
            processes.reserve_heap(tracker.peak["total"], clock.group.size)
        clock.group.barrier()
        marks.clear()
        began = time.thread_time()
        with nullcontext() if turn else tracker:
            engine.step(batches, lambda phase: beat())
            engine.synchronize()
        spent.append(time.thread_time() - began)
        between.append([(b - a) * clock.ranks_per_core for a, b in pairwise([began, *marks])])
    called: Counter[tuple[str, float, float]] = Counter()
    for o in traced.step:
        if isinstance(o, Operator):
            called[o.name, (o.read + o.written) / o.calls, o.flops / o.calls] += o.calls
    return {
        "operators": [(*call, times) for call, times in called.items()],
        "seconds": fmean(spent[1:]) * clock.ranks_per_core,
        "between": between[1:],
    }
