"""No layout's step reads what another stream may still write or release; and a wait that lacks is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Training
from tests.races.step import run
from tests.simulate.trace.test_repeat import LAYOUTS
from tests.training import smallest

WAITING = ("zero1", "zero2-md", "zero3", "tp", "sp", "1f1b")
"""Layouts of which every wait is tried."""


def experiment(layout: Layout) -> Experiment:
    """Small, and with several buckets and micro-batches."""
    micro_batches = 4 if layout.schedule == "interleaved" else 3
    layout = replace(
        layout,
        global_batch=layout.dp * layout.micro_batch * micro_batches,
        bucket_bytes=min(layout.bucket_bytes, 60_000),
        stage_layers=(2, 1) if layout.stage_layers else (),
    )
    training = Training(steps=5, clip=1.0, warmup_steps=1)
    return Experiment(name="streams", model=smallest(layout), layout=layout, training=training)


@pytest.mark.parametrize("name", LAYOUTS)
def test_streams_are_ordered_and_the_host_never_waits(name: str) -> None:
    """Whatever torch keeps; from the second step on the same memory is asked for, as a captured step has to.

    ZeRO 3 of March 2021 waits as it did then.
    """
    found = experiment(LAYOUTS[name])
    for stage in range(found.layout.pp):
        seen = run(found, stage=stage, steps=3)
        assert not seen.races
        assert bool(seen.host_waits) == (found.layout.zero3_gather == "parameter")
        assert seen.allocated[1] == seen.allocated[2]


@pytest.mark.parametrize("name", WAITING)
def test_every_wait_is_needed(name: str) -> None:
    """Without one of them some pair of accesses is in no order, and that is seen."""
    found = experiment(LAYOUTS[name])
    waits = run(found).waits
    assert waits
    for line in waits:
        assert run(found, dropped=line).races, line
