"""Benchmark of the allocator model: the replay of 100,000 events must take less than a second of CPU time.

make benchmarks PYTEST_ARGS='-k allocator'
"""

from __future__ import annotations

import random
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from repro.simulate.memory.allocator import replay
from repro.simulate.memory.pools import MIB
from repro.simulate.trace.events import Alloc, Event, Free, PhaseStart

pytestmark = pytest.mark.benchmarks

EVENTS = 100_000


def transformer_steps() -> list[Event]:
    """Return the events of transformer steps: forward allocates checkpoints, and every layer has temporaries."""
    events: list[Event] = [Alloc(id, 24 * MIB, "parameters", "", "") for id in range(200)]
    count = len(events)
    while len(events) < EVENTS:
        checkpoints = []
        for phase in ("forward", "backward"):
            events.append(PhaseStart(phase, 0))
            for _ in range(125):
                if phase == "forward":
                    checkpoints.append(count)
                    events.append(Alloc(count, 16 * MIB, "checkpoints", "", ""))
                    count += 1
                temporaries = range(count, count + 12)
                count += 12
                events += [
                    Alloc(id, (1 + id % 7) * 3 * MIB + 512, "activations", "", "") for id in temporaries
                ]
                events += [Alloc(count, 4096, "activations", "", ""), Free(count)]
                events += [Free(id) for id in temporaries]
                count += 1
                if phase == "backward":
                    events.append(Free(checkpoints.pop()))
    return events[:EVENTS]


def random_events() -> list[Event]:
    """Return random allocation sizes in random order of frees, which leaves thousands of free blocks."""
    generator = random.Random(0)
    events: list[Event] = []
    live: list[int] = []
    for id in range(EVENTS):
        if live and generator.random() < 0.45:
            events.append(Free(live.pop(generator.randrange(len(live)))))
        else:
            events.append(Alloc(id, int(2 ** generator.uniform(8, 23)), "activations", "", ""))
            live.append(id)
    return events


TRACES = {"steps": transformer_steps, "scattered": random_events}


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("segments", ["plain", "expandable"])
def test_replay_takes_less_than_a_second(benchmark: BenchmarkFixture, trace: str, segments: str) -> None:
    benchmark.group = f"replay of {EVENTS} events, {trace}"
    events = TRACES[trace]()
    result = benchmark.pedantic(
        replay, args=(events,), kwargs={"expandable": segments == "expandable"}, rounds=5, warmup_rounds=1
    )
    assert result.peak_reserved >= result.peak_allocated > 0
    assert benchmark.stats.stats.min < 1
