"""A virtual clock per rank, and the idle times of pipeline stages in a step with fixed durations of passes.

The clock advances in `sleep`, and in a wait until the awaited message was sent.
A schedule therefore has its exact ideal times on every machine. Messages take no time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from repro.config import Layout
from repro.config.enums import Phase
from repro.engines import build_engine
from repro.measure import timing
from repro.measure.timing import COMPUTE_PHASES, StageWaits, StepClock
from repro.parallel import mesh as meshes
from tests.clock import Clock
from tests.pool import RankPool
from tests.training import TINY, micro_batches, tiny

_numbers = itertools.count()
"""Numbers of clocks. Ranks of a pool run the same tests, so that their numbers agree."""


class VirtualClock(Clock):
    """Replacement of the module `time` while `virtual_time` is open; it counts seconds from there."""

    def __init__(self) -> None:
        super().__init__(now=0.0)
        self._store = c10d._get_default_store()
        self._number = next(_numbers)
        self._count: Counter[str] = Counter()
        self._awaited: dict[dist.Work, list[str]] = {}
        """Store keys of the send times that each work waits for."""
        self._blocking: list[str] = []
        """Store keys of the send times that a blocking collective waits for."""

    def _next_key(self, label: str) -> str:
        """Return the store key of the next send time; messages of a tag, and collectives, are issued in order."""
        self._count[label] += 1
        return f"time {self._number} {label} {self._count[label]}"

    def isend(self, real: Callable[..., Any], tensor: Any, dst: Any = None, **options: Any) -> Any:
        to, tag, name = _peer(dst, options.get("group_dst"), options)
        self._store.set(self._next_key(f"{name} {tag} {dist.get_rank()}->{to}"), repr(self.now))
        return real(tensor, dst, **options)

    def irecv(self, real: Callable[..., Any], tensor: Any, src: Any = None, **options: Any) -> Any:
        source, tag, name = _peer(src, options.get("group_src"), options)
        work = real(tensor, src, **options)
        self._awaited[work] = [self._next_key(f"{name} {tag} {source}->{dist.get_rank()}")]
        return work

    def all_reduce(self, real: Callable[..., Any], tensor: Any, *options: Any, **named_options: Any) -> Any:
        group = named_options.get("group") or c10d._get_default_group()
        key = self._next_key(f"{group.group_name} all")
        self._store.set(f"{key} {dist.get_rank()}", repr(self.now))
        self._blocking = [f"{key} {rank}" for rank in dist.get_process_group_ranks(group)]
        work = real(tensor, *options, **named_options)
        if work is not None:
            self._awaited[work] = self._blocking
        self._blocking = []
        return work

    def wait(self, real: Callable[..., Any], work: dist.Work, *limit: Any) -> Any:
        done = real(work, *limit)
        keys = self._awaited.pop(work, self._blocking)
        self.now = max([self.now, *(float(self._store.get(key)) for key in keys)])
        return done


def _peer(rank: int | None, in_group: int | None, options: dict[str, Any]) -> tuple[int, int, str]:
    """Return the global rank of the other side, the tag and the name of the group."""
    group = options.get("group") or c10d._get_default_group()
    number = dist.get_global_rank(group, in_group) if rank is None and in_group is not None else rank
    assert number is not None
    return number, options.get("tag", 0), group.group_name


@contextmanager
def virtual_time() -> Iterator[VirtualClock]:
    """Replace the clock of `repro.measure.timing`; waits for messages and all-reduces advance it."""
    clock, patch = VirtualClock(), mock.patch.multiple
    functions: dict[str, Any] = {
        "isend": partial(clock.isend, dist.isend),
        "irecv": partial(clock.irecv, dist.irecv),
        "all_reduce": partial(clock.all_reduce, dist.all_reduce),
    }
    real_wait = dist.Work.wait

    def wait(work: dist.Work, *limit: Any) -> Any:
        return clock.wait(real_wait, work, *limit)

    with patch(dist, **functions), patch(c10d, **functions), patch(timing, time=clock):
        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield clock
        finally:
            dist.Work.wait = real_wait  # type: ignore[method-assign]


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
