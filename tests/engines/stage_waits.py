"""A step with fixed durations of passes, and the idle times of its pipeline stages; runs inside rank pools."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from repro.config import Layout
from repro.config.enums import Phase
from repro.engines import build_engine
from repro.measure.timing import COMPUTE_PHASES, StageWaits, StepClock
from repro.parallel import mesh as meshes
from tests.engines.virtual_time import VirtualClock, virtual_time
from tests.pool import RankPool
from tests.training import TINY, micro_batches, tiny

FORWARD_S, BACKWARD_S = 0.04, 0.08
"""Durations of the forward and the backward pass of a block, in seconds."""


def _add_delays(clock: VirtualClock, module: Any, inputs: Any, output: Any) -> None:
    clock.sleep(FORWARD_S)
    (output[0] if isinstance(output, tuple) else output).register_hook(lambda _: clock.sleep(BACKWARD_S))


def busy_and_idle(pool: RankPool, layout: Layout, engine: str) -> list[tuple[float, float, float]]:
    """Return each rank's compute and idle seconds in step 2, and the idle seconds that the engine reports."""
    return pool.run(_second_step, layout, engine)


def _second_step(layout: Layout, engine: str) -> tuple[float, float, float]:
    blocks = layout.pp * layout.chunks
    experiment = tiny(layout, replace(TINY, name=f"tiny-{blocks}", layers=blocks), engine)
    device, batches = torch.device("cpu"), micro_batches(experiment, 0, 0)
    with virtual_time() as clock:
        built: Any = build_engine(experiment, meshes.distributed_mesh(layout, "cpu"), device)
        parts = {"native": "parts", "torch": "modules", "megatron": "models"}[engine]
        for part in getattr(built, parts):
            for module in getattr(part, "model", part).modules():
                if type(module).__name__ in ("Block", "PlainBlock", "TransformerLayer"):
                    module.register_forward_hook(partial(_add_delays, clock))
        built.step(batches, lambda phase: None)
        clocks = measured, reported = StepClock(device), StepClock(device)
        for step_clock in clocks:
            step_clock.begin()
        with StageWaits(measured.mark) as watch:

            def observe(phase: Phase) -> None:
                watch(phase)
                reported.mark(phase)

            built.step(batches, observe)
        for step_clock in clocks:
            step_clock.mark("end")
        ((row,), (reported_row,)) = measured.read(), reported.read()
    return sum(row[phase] for phase in COMPUTE_PHASES), row[Phase.IDLE], reported_row[Phase.IDLE]


PLAIN = Layout(pp=2, micro_batch=1, global_batch=4)
SCHEDULES = {
    "gpipe": replace(PLAIN, schedule="gpipe"),
    "1f1b": PLAIN,
    "interleaved": replace(PLAIN, schedule="interleaved", chunks=2),
}


def bubble_fraction(layout: Layout) -> float:
    """Return the ratio of bubble time to compute time, (p - 1)/(v m) (2104.04473 sec. 2.2)."""
    return (layout.pp - 1) / (layout.chunks * layout.accumulation)
