"""What a step computes while the ranks that share the cores do the same: the engine's own, without its messages.

Operators that are timed one by one, each called again and again, take less than in a step.  There others, and the code
between them, have used the caches since; and what another rank has had the core in between takes them all.
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

from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Experiment
from repro.engines.native.engine import NativeEngine
from repro.engines.native.part import MicroBatch
from repro.measure.memory import MemoryTracker
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel.transports import NoTransport, Work
from repro.simulate.trace.events import Operator
from repro.simulate.trace.roles import roles, trace
from repro.util import processes

STEPS = 3
"""Timed, of each rank, after one that is not."""


class Silent(NoTransport):
    """Has a message's result hold numbers as good as those that would come: none is tiny, which would be slow."""

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        output.view(-1, input.numel()).copy_(input.clone())  # which may be a part of it
        return Work()

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        tensor.fill_(0.5)
        return Work()


def silent_step(
    experiment: Experiment, clock: OperatorClock, beat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One rank's step of `experiment`, of the first stage and of few micro-batches, while all ranks have theirs:
    `operators` as (name, bytes, FLOP, how often), and with as many ranks to a core its `seconds`, and those `between`
    its messages in each of `STEPS` steps.  `beat` is called at each message and phase."""
    traced = trace(experiment, roles(experiment)[0], gloo=True)
    short = replace(experiment, layout=traced.layout)
    mesh = meshes.build(traced.layout, 0, lambda ranks: Silent())
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
    for turn in range(1 + STEPS):
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
