"""A step whose passes are of told length, and what is seen of its stages' waiting; runs inside rank pools."""

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
from tests.engines.told_time import ToldTime, told_time
from tests.pool import RankPool
from tests.training import TINY, micro_batches, tiny

FORWARD_S, BACKWARD_S = 0.04, 0.08
"""Of a pass of a block."""


def _slow(time: ToldTime, module: Any, inputs: Any, output: Any) -> None:
    time.sleep(FORWARD_S)
    (output[0] if isinstance(output, tuple) else output).register_hook(lambda _: time.sleep(BACKWARD_S))


def busy_and_idle(pool: RankPool, layout: Layout, engine: str) -> list[tuple[float, float, float]]:
    """Seconds that each rank computed and waited as seen, and waited by the engine's own word, in its second step."""
    return pool.run(_second_step, layout, engine)


def _second_step(layout: Layout, engine: str) -> tuple[float, float, float]:
    with told_time() as time:
        return _seen(time, layout, engine)


def _seen(time: ToldTime, layout: Layout, engine: str) -> tuple[float, float, float]:
    blocks = layout.pp * layout.chunks
    experiment = tiny(layout, replace(TINY, name=f"tiny-{blocks}", layers=blocks), engine)
    built: Any = build_engine(experiment, meshes.distributed_mesh(layout, "cpu"), torch.device("cpu"))
    parts = {"native": "parts", "torch": "modules", "megatron": "models"}[engine]
    for part in getattr(built, parts):
        for module in getattr(part, "model", part).modules():
            if type(module).__name__ in ("Block", "PlainBlock", "TransformerLayer"):
                module.register_forward_hook(partial(_slow, time))
    batches = micro_batches(experiment, 0, 0)
    built.step(batches, lambda phase: None)
    seen, message = StepClock(torch.device("cpu")), StepClock(torch.device("cpu"))
    for clock in (seen, message):
        clock.begin()
    with StageWaits(seen.mark) as watch:

        def observe(phase: Phase) -> None:
            watch(phase)
            message.mark(phase)

        built.step(batches, observe)
    for clock in (seen, message):
        clock.mark("end")
    ((row,), (own,)) = seen.read(), message.read()
    return sum(row[phase] for phase in COMPUTE_PHASES), row[Phase.IDLE], own[Phase.IDLE]


PLAIN = Layout(pp=2, micro_batch=1, global_batch=4)
SCHEDULES = {
    "gpipe": replace(PLAIN, schedule="gpipe"),
    "1f1b": PLAIN,
    "interleaved": replace(PLAIN, schedule="interleaved", chunks=2),
}


def of_formula(layout: Layout) -> float:
    """(p - 1)/(v m), 2104.04473 sec. 2.2."""
    return (layout.pp - 1) / (layout.chunks * layout.accumulation)
