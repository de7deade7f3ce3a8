"""What an operator costs the host: a step whose operators have nothing to do, forward and backward under autograd."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from repro.accuracy.calibrate.clock import OperatorClock, timing
from repro.config import Experiment, Layout, Model
from repro.engines.native.engine import NativeEngine
from repro.engines.native.part import MicroBatch
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.simulate.trace.roles import roles, trace

WIDTH, LAYERS = 8, 4


class LaunchBench:
    """The engine's own code on a model of width 8, on this rank alone while the others do the same."""

    def __init__(self, clock: OperatorClock, like: Experiment):
        self.clock = clock
        model = Model(name="launch", layers=LAYERS, hidden=WIDTH, heads=1, vocab=2 * WIDTH, seq=WIDTH)
        layout = Layout(precision=like.layout.precision)
        experiment = replace(like, model=model, layout=layout, training=replace(like.training, dropout=0.0))
        traced = trace(experiment, roles(experiment)[0])
        self._operators = [
            (o.name, o.read + o.written, o.flops) for times, o in traced.operators() for _ in range(times)
        ]
        self._engine = NativeEngine(experiment, meshes.single(), clock.device)
        tokens = torch.zeros(1, WIDTH, dtype=torch.int64, device=clock.device)
        self._batches = [MicroBatch(tokens, tokens, BatchPosition(0, 0))]
        self._seconds: list[float] = []
        for _ in range(2):
            self._step()

    def sample(self) -> None:
        """Time one step.  Samples are taken all through the calibration: what disturbs the machine for a moment
        disturbs few of them."""
        self._step()  # the code is back in the caches
        self.clock.synchronize()
        self.clock.group.barrier()
        self._seconds.append(self.clock.in_a_crowd(lambda i: self._step(), self._step))

    def result(self) -> dict[str, Any]:
        """The step's operators as (name, bytes, FLOP), and its seconds; on a GPU the host's, until all is enqueued."""
        return {"operators": self._operators, **timing(self._seconds)._asdict()}

    def _step(self) -> float:
        began = time.perf_counter()
        self._engine.step(self._batches, lambda phase: None)
        self._engine.synchronize()
        return time.perf_counter() - began
