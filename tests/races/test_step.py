"""Tests that the streams of a step are ordered in all layouts, and that each missing wait is detected as a race."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Training
from tests.races.step import run_steps
from tests.simulate.trace.test_repeat import LAYOUTS
from tests.training import smallest

LAYOUTS_WITH_ALL_WAITS = ("zero1", "zero2-md", "zero3", "tp", "sp", "1f1b")
"""Layouts that together run every wait of the product."""
STREAM_LAYOUTS = [
    name
    for name in LAYOUTS
    if name not in ("fp32", "bf16", "fp32-gradients", "cp", "sp", "selective", "unfused", "reference")
]
"""Layouts with different streams. The other layouts differ from these in operators or data types only."""


def experiment(layout: Layout) -> Experiment:
    """Return a small experiment with several buckets and micro-batches."""
    micro_batches = 4 if layout.schedule == "interleaved" else 3
    layout = replace(
        layout,
        global_batch=layout.dp * layout.micro_batch * micro_batches,
        bucket_bytes=min(layout.bucket_bytes, 60_000),
        stage_layers=(2, 1) if layout.stage_layers else (),
    )
    training = Training(steps=5, clip=1.0, warmup_steps=1)
    return Experiment(name="streams", model=smallest(layout), layout=layout, training=training)


@pytest.mark.parametrize("name", STREAM_LAYOUTS)
def test_streams_are_ordered_and_the_host_never_waits(name: str) -> None:
    """From the second step on, all steps allocate the same memory, as a captured CUDA graph requires.

    Stage 3 of March 2021 is the exception: its host waits.
    """
    tried = experiment(LAYOUTS[name])
    for stage in range(tried.layout.pp):
        findings = run_steps(tried, stage=stage, steps=3)
        assert not findings.races
        assert bool(findings.host_waits) == (tried.layout.zero3_gather == "parameter")
        assert findings.allocated[1] == findings.allocated[2]


def test_each_missing_wait_causes_a_race() -> None:
    """Each wait is ignored in one layout."""
    tested: set[str] = set()
    for name in LAYOUTS_WITH_ALL_WAITS:
        tried = experiment(LAYOUTS[name])
        waits = set(run_steps(tried).waits)
        assert waits
        for line in sorted(waits - tested):
            assert run_steps(tried, ignored_line=line).races, f"{name}: {line}"
        tested |= waits
