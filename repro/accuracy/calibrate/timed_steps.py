"""Timed training steps: the host overhead of an operator, and a step without messages on crowded cores.

An operator that is timed alone is faster than in a step, where other operators and other ranks use the caches and the
core in between.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from repro.accuracy.calibrate.clock import OperatorClock, timing
from repro.config import Experiment, Layout, Model
from repro.config.enums import Phase
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.measure.memory import MemoryTracker
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel.transports import NoTransport, Work
from repro.simulate.trace.events import Operator, PhaseStart
from repro.simulate.trace.roles import roles, trace
from repro.util import processes

WIDTH, LAYERS = 8, 4
"""Sizes of a model whose operators have nothing to compute."""
TIMED_STEPS = 3
"""Timed steps of a rank, after one warm-up step."""


class LaunchBench:
    """Time the engine's step on a model of width 8, on every rank alone and at the same time."""

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
        """Seconds of the backward pass of every step."""
        self._backward_operators = 0
        is_backward = False
        for event in traced.step:
            if isinstance(event, PhaseStart):
                is_backward = event.name == Phase.BACKWARD
            self._backward_operators += is_backward and isinstance(event, Operator)
        for _ in range(2):
            self._step()

    def sample(self) -> None:
        """Time one step. The calibration spreads the samples, so that a short disturbance affects few of them."""
        self._step()  # brings the code back into the caches
        self.clock.synchronize()
        self.clock.group.barrier()
        self._seconds.append(self.clock.in_a_crowd(lambda i: self._step(), self._step))

    def result(self) -> dict[str, Any]:
        """Return the step's operators as (name, bytes, FLOP), its timing, and the same of the backward pass.

        On a GPU, the seconds are those to enqueue the operators. `backward_operators` is a number.
        """
        return {
            "operators": self._operators,
            **timing(self._seconds)._asdict(),
            "backward_operators": self._backward_operators,
            "backward_s": statistics.median(self._backward_s),
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
    """Fill received tensors with ordinary numbers: arithmetic on denormal numbers would be slow."""

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        output.view(-1, input.numel()).copy_(input.clone())  # the input may be a part of the output
        return Work()

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        tensor.fill_(0.5)
        return Work()


def time_silent_step(
    experiment: Experiment, clock: OperatorClock, beat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Time steps of the first stage of `experiment` without messages, with few micro-batches, on all ranks at once.

    Returns `operators` as (name, bytes, FLOP, calls), the mean `seconds` of a step, and the seconds `between` its
    messages for each step. The seconds count the waiting for a shared core. `beat` is called at each message and phase.
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
        "seconds": statistics.fmean(spent[1:]) * clock.ranks_per_core,
        "between": between[1:],
    }
