"""Benchmark of simulations, plans and the allocator model at the published scale: seconds and host memory.

    make benchmarks PYTEST_ARGS=tests/benchmarks/test_traces.py

Targets: 2 s for 100B on 400 GPUs, and 4 s for 1T on 1024 or 3072 GPUs. 175B on 96,000 GPUs may take as long as on 960.
Each simulation may use 2 GiB of host memory. A plan may take 5 s on two cores. The replay of 100,000 events must take
less than a second of CPU time.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from repro import cli
from repro.config import Experiment, Layout
from repro.config.suites import load_suite
from repro.config.systems import load_system_file
from repro.launch.simulated import simulate_experiment, simulated_system
from repro.simulate.memory.allocator import replay
from repro.simulate.memory.live_bytes import measure_live_bytes
from repro.simulate.memory.pools import MIB
from repro.simulate.placement import Placement
from repro.simulate.trace.events import Alloc, Event, Free, PhaseStart
from repro.simulate.trace.roles import roles, trace

OPTIONS = {
    "100B on 400 (C4)": (
        "--model deepspeed-100b --system dgx2 --gpus 400 --tp 16 --zero 2 --recompute --pa --micro-batch 32"
    ),
    "1T on 1024, ZeRO 3": (
        "--model megatron-1t --system dgx2 --gpus 1024 --tp 16 --zero 3 --recompute --pa --micro-batch 1"
    ),
    "1T on 3072, 3D": (
        "--model megatron-1t --system selene --gpus 3072 --tp 8 --pp 64 --micro-batch 1 --global-batch 3072 "
        "--recompute"
    ),
    **{
        f"175B on {gpus}": f"--model megatron-175b --system selene --gpus {gpus} --tp 8 --pp 8 --zero 1 --recompute "
        f"--micro-batch 1 --global-batch {gpus}"
        for gpus in (960, 96_000)
    },
}
MAX_MEMORY_BYTES = 2 * 2**30


@pytest.mark.parametrize("name", OPTIONS)
def test_simulation_in_process(benchmark: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The time excludes the import of torch."""
    benchmark.group = "simulate one step"

    def run_benchmark() -> dict[str, Any]:
        assert cli.main(["simulate", *OPTIONS[name].split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    found = benchmark.pedantic(run_benchmark, rounds=3, iterations=1, warmup_rounds=1)
    benchmark.extra_info["roles"] = list(found["memory"]["by_role"])
    benchmark.extra_info["trace_seconds"] = found["trace_seconds"]


@pytest.mark.parametrize("name", OPTIONS)
def test_simulation_from_the_shell_fits_in_host_memory(benchmark: Any, name: str) -> None:
    """The time includes the start of a separate process."""
    benchmark.group = "repro simulate, from the shell"
    code = (
        "import resource, sys, repro.cli\n"
        "status = repro.cli.main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)\n"
        "sys.exit(status)"
    )

    def process() -> int:
        command = [sys.executable, "-c", code, "simulate", *OPTIONS[name].split(), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return int(done.stderr.split()[-1])

    peak = benchmark.pedantic(process, rounds=1, iterations=1)
    benchmark.extra_info["peak_rss_bytes"] = peak
    assert peak < MAX_MEMORY_BYTES


SUITES = ("zero_throughput", "turing_nlg", "megatron_2021", "a100_clusters")
SAMPLING_STRIDE = 20
EXPERIMENT_LIMIT_S = 0.15


def published_experiments() -> list[tuple[Experiment, str]]:
    """Return every 20th published experiment of the native engine with its suite."""
    return [
        (entry.experiment, suite)
        for suite in SUITES
        for entry in load_suite(Path(f"suites/{suite}.toml")).entries
        if entry.experiment.engine == "native"
    ][::SAMPLING_STRIDE]


@pytest.mark.benchmark(timer=time.process_time)
def test_traces_and_memory_of_published_experiments(benchmark: Any) -> None:
    """Measure the CPU seconds per role for traces and memory of every 20th published experiment."""
    benchmark.group = "trace and memory of published roles"
    experiment_roles = [(e, role) for e, _ in published_experiments() for role in roles(e)]

    def run_benchmark() -> None:
        for experiment, role in experiment_roles:
            events = trace(experiment, role).events
            measure_live_bytes(events)
            replay(events)

    benchmark.pedantic(run_benchmark, rounds=3, iterations=1)
    benchmark.extra_info["seconds_per_role"] = benchmark.stats.stats.min / len(experiment_roles)


@pytest.mark.benchmark(timer=time.process_time)
def test_simulation_of_published_experiments(benchmark: Any) -> None:
    """Measure the CPU seconds per simulation of every 20th published experiment with its interval."""
    benchmark.group = "simulate published experiments"
    sampled = published_experiments()

    def run_benchmark() -> None:
        for experiment, suite in sampled:
            record = simulate_experiment(experiment, simulated_system(experiment), suite)
            assert record.outcome in ("ok", "oom")

    benchmark.pedantic(run_benchmark, rounds=3, iterations=1)
    each = benchmark.extra_info["seconds_per_experiment"] = benchmark.stats.stats.min / len(sampled)
    benchmark.extra_info["of_limit"] = each / EXPERIMENT_LIMIT_S


def test_placement_of_3072_ranks(benchmark: Any) -> None:
    """Find the links of one rank's groups, which the simulation needs for each stage."""
    layout, system = Layout(tp=8, pp=64, dp=6), load_system_file("selene")

    def run_benchmark() -> set[str]:
        placement = Placement(layout, system)
        axes = ("tp", "dp", "pp", "embedding")
        return {
            placement.link_of(a, placement.ranks_of(a, rank)) for rank in range(0, 3072, 48) for a in axes
        }

    assert benchmark(run_benchmark) == {"", "nvlink", "inter-node"}


PLANS = {
    "175B on 1024": "plan --model megatron-175b --system selene --gpus 1024",
    "405B on 16384": "plan --model llama3-405b --system dgx-h100 --gpus 16384",
}
PLAN_LIMIT_S = 5.0


@pytest.mark.parametrize("name", PLANS)
def test_plan_of_published_clusters(benchmark: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The search simulates the best layouts with intervals, on all cores."""
    benchmark.group = "plan a job"

    def run_plan() -> list[dict[str, Any]]:
        assert cli.main([*PLANS[name].split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    rows = benchmark.pedantic(run_plan, rounds=1, iterations=1)
    benchmark.extra_info["of_limit"] = benchmark.stats.stats.min / PLAN_LIMIT_S
    benchmark.extra_info["best"] = rows[0]["layout"] | {"step_s": rows[0]["time"]["step_s"]}
    assert all(row["evidence"] == "full" for row in rows[:3])
    assert all(row["time"]["interval"] for row in rows[:12])


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


@pytest.mark.benchmarks
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
