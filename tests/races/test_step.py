"""No layout's step reads what another stream may still write or release; and a wait that lacks is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Training
from tests.races.step import run
from tests.simulate.trace.test_repeat import LAYOUTS
from tests.training import smallest

WAITING = ("zero1", "zero2-md", "zero3", "tp", "sp", "1f1b")
"""Layouts that have every wait of the product."""
ORDERED = [
    name
    for name in LAYOUTS
    if name not in ("fp32", "bf16", "fp32-gradients", "cp", "sp", "selective", "unfused", "reference")
]
"""Layouts whose streams differ: other layouts change operators or data types of these."""


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


@pytest.mark.parametrize("name", ORDERED)
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


def test_every_wait_is_needed() -> None:
    """Without one of the waits, some pair of accesses has no order. Each wait is dropped from one layout."""
    tried: set[str] = set()
    for name in WAITING:
        found = experiment(LAYOUTS[name])
        waits = set(run(found).waits)
        assert waits
        for line in sorted(waits - tried):
            assert run(found, dropped=line).races, f"{name}: {line}"
        tried |= waits
