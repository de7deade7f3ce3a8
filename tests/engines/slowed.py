"""A step whose passes are long and of known length, and what is seen of its stages' waiting; runs inside rank pools."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from repro.config import Layout
from repro.config.enums import Phase
from repro.engines import build_engine
from repro.measure.timing import COMPUTING, StepClock
from repro.measure.waiting import StageWaits
from repro.parallel import mesh as meshes
from tests.pool import RankPool, take_turns_as_usual
from tests.training import TINY, micro_batches, tiny

FORWARD_S, BACKWARD_S = 0.04, 0.08
"""A pass of a block of a tiny model takes a few milliseconds, and then sleeps for so long."""
STEPS = 3


def _slow(module: Any, inputs: Any, output: Any) -> None:
    time.sleep(FORWARD_S)
    (output[0] if isinstance(output, tuple) else output).register_hook(lambda _: time.sleep(BACKWARD_S))


def busy_and_idle(pool: RankPool, layout: Layout, engine: str) -> tuple[float, float, float]:
    """Seconds that the busiest rank computed and waited as seen, and waited by the engine's own word: of the shortest
    step, since what else runs here only adds."""
    steps = zip(*pool.run(_steps, layout, engine), strict=True)
    return min((max(ranks) for ranks in steps), key=lambda seconds: seconds[0] + seconds[1])


def _steps(layout: Layout, engine: str) -> list[tuple[float, float, float]]:
    """`busy_and_idle` of this rank in each step after the first."""
    take_turns_as_usual()
    blocks = layout.pp * layout.chunks
    experiment = tiny(layout, replace(TINY, name=f"tiny-{blocks}", layers=blocks), engine)
    built: Any = build_engine(experiment, meshes.distributed(layout, "cpu"), torch.device("cpu"))
    parts = {"native": "parts", "torch": "modules", "megatron": "models"}[engine]
    for part in getattr(built, parts):
        for module in getattr(part, "model", part).modules():
            if type(module).__name__ in ("Block", "TransformerLayer"):
                module.register_forward_hook(_slow)
    batches = micro_batches(experiment, 0, 0)
    built.step(batches, lambda phase: None)
    found = []
    for _ in range(STEPS):
        seen, said = StepClock(torch.device("cpu")), StepClock(torch.device("cpu"))
        for clock in (seen, said):
            clock.begin()
        with StageWaits(seen.mark) as watch:

            def observe(phase: Phase, watch: Any = watch, said: StepClock = said) -> None:
                watch(phase)
                said.mark(phase)

            built.step(batches, observe)
        for clock in (seen, said):
            clock.mark("end")
        ((row,), (own,)) = seen.read(), said.read()
        found.append((sum(row[phase] for phase in COMPUTING), row[Phase.IDLE], own[Phase.IDLE]))
    return found


PLAIN = Layout(pp=2, micro_batch=1, global_batch=4)
SCHEDULES = {
    "gpipe": replace(PLAIN, schedule="gpipe"),
    "1f1b": PLAIN,
    "interleaved": replace(PLAIN, schedule="interleaved", chunks=2),
}


def of_formula(layout: Layout) -> float:
    """(p - 1)/(v m), 2104.04473 sec. 2.2."""
    return (layout.pp - 1) / (layout.chunks * layout.accumulation)
