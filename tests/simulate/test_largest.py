"""Tests of the cost of a simulation: host memory of the largest accepted sizes, and function calls of 100,000 GPUs."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from repro.config import Experiment, Layout, models, sizes, systems
from repro.simulate.step import Simulation, simulate

MAX_HOST_BYTES = 4 * 2**30
CODE = "import sys; from repro.cli import main; sys.exit(main())"
DEEP_MODEL = f"layers = {sizes.LAYERS.value}\nhidden = 64\nheads = 4\nvocab = 512\nseq = 128\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        f"--model gpt2-1.5b --gpus {sizes.RANKS.value} --zero 3",
        "--model deep.toml --gpus 8 --zero 3 --recompute",
        f"--model gpt2-1.5b --gpus 8 --pp 8 --global-batch {sizes.MICRO_BATCHES.value // 8}",
    ],
    ids=["ranks", "layers", "micro-batches"],
)
def test_a_simulation_of_the_largest_size_ends(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(DEEP_MODEL)
    process = subprocess.run(
        [sys.executable, "-c", CODE, "simulate", "--system", "dgx2", "--json", *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MAX_HOST_BYTES, MAX_HOST_BYTES)),
        check=False,
    )
    assert process.returncode in (0, 1), process.stderr
    assert '"outcome"' in process.stdout


FEW, MANY = 1_000, 100_000


@cache
def simulate_and_count(gpus: int, interval: bool = False) -> tuple[Simulation, int]:
    """Return a simulated step of `gpus` GPUs with four micro-batches per pipeline, and its number of function calls.
    A Python loop over ranks would increase that number."""
    dp = gpus // 4
    layout = Layout(tp=2, pp=2, dp=dp, zero=1, global_batch=4 * dp, precision="bf16", recompute=True)
    system, model = systems.load_system_file("llama3-h100"), models.load_model("tiny-stages")
    experiment = Experiment(name="x", model=model, layout=layout, system="llama3-h100")
    calls: Counter[str] = Counter()

    def count_call(frame: FrameType, event: str, argument: Any) -> None:
        calls[event] += 1

    previous = sys.getprofile()
    sys.setprofile(count_call)
    try:
        simulation = simulate(experiment, system, time=True, record=True, interval=interval)
    finally:
        sys.setprofile(previous)
    return simulation, calls["call"] + calls["c_call"]


def test_events_spans_and_calls_do_not_grow_with_replicas() -> None:
    simulate_and_count(8)  # imports all modules
    (few, few_calls), (many, many_calls) = simulate_and_count(FEW), simulate_and_count(MANY)
    # Replicas that outnumber the elements of a bucket have empty shards, with fewer events.
    for one, other in zip(few.traces, many.traces, strict=True):
        assert len(other.events) == pytest.approx(len(one.events), rel=0.02)
        assert len([*other.operators()]) == pytest.approx(len([*one.operators()]), rel=0.02)
    spans, more_spans = (len(each.time.timeline.spans) for each in (few, many))
    assert 100 < spans == pytest.approx(more_spans, rel=0.02)
    assert many_calls == pytest.approx(few_calls, rel=0.05)


@pytest.mark.slow
def test_calls_for_an_interval_do_not_grow_with_replicas() -> None:
    """The placement of groups is computed once for all values of the uncertain inputs."""
    simulate_and_count(8, True)
    assert simulate_and_count(MANY, True)[1] == pytest.approx(simulate_and_count(FEW, True)[1], rel=0.05)
