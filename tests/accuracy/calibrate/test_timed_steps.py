"""Tests of timed steps without messages: operators of the real step, on values that are not subnormal."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest
import torch

from repro.accuracy.calibrate import document
from repro.accuracy.calibrate.benchmarks import TIMED_STEPS, SilentTransport, time_silent_step
from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Layout
from repro.config.timing import OperatorRate
from repro.parallel import mesh as meshes
from repro.parallel.ledger import SEND
from repro.simulate.trace.events import Message
from repro.simulate.trace.roles import roles, trace
from tests.training import tiny

LAYOUTS = {
    "dp": Layout(dp=4, zero=1, global_batch=8),
    "zero3": Layout(dp=4, zero=3, recompute=True, global_batch=4),
    "tp": Layout(tp=2, dp=2, kernels="unfused", global_batch=2),
    "pp": Layout(pp=2, dp=2, global_batch=8),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_silent_step_calls_the_operators_of_the_real_step(layout: Layout) -> None:
    """A step has one interval of computation per message; their sum excludes the end of the step."""
    experiment = tiny(layout)
    clock = OperatorClock(torch.device("cpu"), meshes.single_rank_mesh().world, repeats=1, neighbours=64)
    found = time_silent_step(experiment, clock)
    traced = trace(experiment, roles(experiment)[0], gloo=True)
    expected, called = Counter[str](), Counter[str]()
    for times, operator in traced.operators():
        expected[operator.name] += times * operator.calls
    for name, _, _, times in found["operators"]:
        called[name] += times
    assert set(called) == set(expected)
    if traced.copies == 0:
        assert called == expected
    if layout.pp == 1:
        sent = sum(isinstance(event, Message) and event.op != SEND for event in traced.step)
        assert [len(parts) for parts in found["between"]] == [sent] * TIMED_STEPS
    assert 0 < sum(map(sum, found["between"])) / TIMED_STEPS <= found["seconds"]


@pytest.mark.parametrize(("jitter", "spread"), [(1e-3, 0.05), (1e-3, 0.0), (0.0, 0.05), (0.0, 0.0)])
def test_jitter_and_spread_of_ranks_are_recovered(jitter: float, spread: float) -> None:
    """Intervals are normal draws with variance `jitter` times their mean. The speed of ranks is a normal draw with
    deviation `spread`."""
    draw, ranks = random.Random(1), 64
    parts = [0.01, 0.04, 0.16] * 40

    def rank() -> dict[str, object]:
        slowdown = draw.gauss(1, spread)
        steps = [
            [slowdown * draw.gauss(mean, (jitter * mean) ** 0.5) for mean in parts]
            for _ in range(TIMED_STEPS)
        ]
        return {"between": steps, "seconds": sum(map(sum, steps)) / TIMED_STEPS}

    message = document._rank_differences([tuple(rank() for _ in range(ranks))])
    found = {key: number["value"] for key, number in message.items()}
    assert found["jitter_s"] == pytest.approx(jitter, rel=0.1, abs=1e-12)
    assert found["spread"] == pytest.approx(spread, rel=0.2, abs=3e-3)


def test_silent_messages_bring_no_subnormal_values() -> None:
    gathered, received = torch.full((2, 12), 1e-40)
    gathered[4:8] = torch.arange(1.0, 5)
    SilentTransport().all_gather(gathered, gathered[4:8]).wait()
    assert gathered.tolist() == [1, 2, 3, 4] * 3, "the parts of other ranks are copies of this rank's part"
    SilentTransport().receive(received, 1, 0).wait()
    assert received.tolist() == [0.5] * 12


def test_document_has_the_ratio_of_step_to_operator_seconds() -> None:
    rates = {"matmul": OperatorRate(fixed_s=1.0, per_flop_s=0.5), "elementwise": OperatorRate(fixed_s=2.0)}
    operators = [("aten.mm", 8.0, 6.0, 2), ("aten.add", 8.0, 0.0, 3)]  # 2 * (1 + 3) + 3 * 2 seconds

    def step(*by_rank: float) -> tuple[dict[str, object], ...]:
        return tuple({"operators": operators, "seconds": seconds} for seconds in by_rank)

    found = document._step([step(14.0, 17.5, 140.0), step(21.0, 24.5, 21.0)], rates)
    assert found[document.STEP] == pytest.approx((1.25 + 1.5) / 2)


FAULTS = """
import resource, torch
from repro.accuracy.calibrate import benchmarks
from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Experiment, Layout, Model
from repro.util import processes
from repro.parallel import mesh as meshes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def counted(peak, count, reserve=processes.reserve_heap):
    global before
    reserve(peak, count)
    before = faults()

torch.set_num_threads(1)
processes.keep_freed_memory()
processes.reserve_heap, before = counted, None
model = Model(name="wide", layers=2, hidden=128, heads=4, vocab=64, seq=512)
layout = Layout(dp=4, zero=3, micro_batch=4, global_batch=16)
clock = OperatorClock(torch.device("cpu"), meshes.single_rank_mesh().world, repeats=1, neighbours=64)
benchmarks.time_silent_step(Experiment(name="one", model=model, layout=layout), clock)
print(faults() - before)
"""


def test_timed_steps_cause_no_page_faults() -> None:
    """A separate process counts the faults, because a heap that retains freed memory cannot be reset."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
