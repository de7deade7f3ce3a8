"""Collectives by payload, and what they cost a computation beside them, through the groups that the engine uses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from repro.calibrate.clock import OperatorClock, Timing, timing
from repro.parallel.comm import MAX, Group, Work

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
OVERLAPPED = ("all_reduce", "reduce_scatter", "all_gather")
OVERLAP_BYTES, PRODUCT_SIZE = 2**24, 512
LONGER = 1.5
"""The computation beside a collective is this many times as long, so that all of the collective is hidden."""


def collective(group: Group, op: str, payload: int, device: torch.device) -> Callable[[], Work]:
    """``op`` on a message of ``payload`` bytes (as the ledger counts them), as a function that starts it."""
    part = max(1, payload // 4 // group.size)
    # Zeros, which stay as they are however often they are summed.
    whole = torch.zeros(part * group.size, device=device)
    mine = torch.zeros(part, device=device)
    if op == "all_reduce":
        return lambda: group.all_reduce(whole)
    if op == "reduce_scatter":
        return lambda: group.reduce_scatter(mine, whole)
    if op == "all_gather":
        return lambda: group.all_gather(whole, mine)
    assert op == "broadcast"
    return lambda: group.broadcast(whole)


def measure(clock: OperatorClock, group: Group, op: str, payload: int) -> Timing:
    """Seconds from the start of a collective to the end of its wait, which all ranks begin together."""
    start = collective(group, op, payload, clock.device)

    def whole() -> None:
        start().wait()

    return _timed(clock, group, whole, payload)


def measure_send(clock: OperatorClock, pipeline: Group, payload: int) -> Timing:
    """Seconds of one message to the next stage: half of there and back, by all pairs of stages at once."""
    message = torch.ones(max(1, payload // 4), device=clock.device)
    back = torch.empty_like(message)
    rank = pipeline.rank
    peer = rank + 1 if rank % 2 == 0 else rank - 1

    def there_and_back() -> None:
        if peer >= pipeline.size:
            return
        if rank % 2 == 0:
            work = pipeline.send(message, peer, 0)
            pipeline.receive(back, peer, 1).wait()
        else:
            pipeline.receive(back, peer, 0).wait()
            work = pipeline.send(message, peer, 1)
        work.wait()

    both = _timed(clock, pipeline, there_and_back, payload)
    return Timing(both.median / 2, both.low / 2, both.high / 2, both.repeats)


def _timed(clock: OperatorClock, group: Group, run: Callable[[], None], payload: int) -> Timing:
    """Seconds of ``run``; several in a row where one is too short to tell.  The number follows from the payload
    and not from the time, since all ranks must make the same calls."""
    calls = 10 if payload <= 2**16 else 3 if payload <= 2**20 else 1
    for _ in range(2):
        run()
    found = []
    for _ in range(clock.repeats):
        clock.flush()
        clock.synchronize()
        group.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        clock.synchronize()
        found.append((time.perf_counter() - began) / calls)
    return timing(found)


def overlap_cost(clock: OperatorClock, group: Group, op: str, payload: int) -> float:
    """Fraction of a collective's seconds by which products beside it take longer than alone; 0 to 1."""
    start = collective(group, op, payload, clock.device)
    x = torch.full((PRODUCT_SIZE, PRODUCT_SIZE), 1.0 / PRODUCT_SIZE, device=clock.device)

    def products(count: int) -> None:
        y: Tensor = x
        for _ in range(count):
            y = x @ y

    def alone() -> None:
        start().wait()

    communication = _slowest(group, _timed(clock, group, alone, OVERLAP_BYTES).median, clock.device)
    one = _slowest(group, _timed(clock, group, lambda: products(1), OVERLAP_BYTES).median, clock.device)
    count = max(1, math.ceil(LONGER * communication / one))

    def both() -> None:
        work = start()
        products(count)
        work.wait()

    compute = _timed(clock, group, lambda: products(count), OVERLAP_BYTES)
    together = _timed(clock, group, both, OVERLAP_BYTES)
    return min(1.0, max(0.0, (together.median - compute.median) / communication))


def _slowest(group: Group, seconds: float, device: torch.device) -> float:
    """The largest of the ranks' numbers, so that all go on with the same."""
    shared = torch.tensor(seconds, device=device)
    group.all_reduce(shared, MAX).wait()
    return float(shared)


def by_payload(
    clock: OperatorClock, group: Group, pipeline: Group, payloads: Sequence[int], beat: Callable[[], None]
) -> dict[str, list[tuple[int, Timing]]]:
    """Every collective and a message to the next stage, at every payload.  ``beat`` is called after each."""
    found: dict[str, list[tuple[int, Timing]]] = {}
    for payload in payloads:
        for op in COLLECTIVES:
            found.setdefault(op, []).append((payload, measure(clock, group, op, payload)))
            beat()
        found.setdefault("send", []).append((payload, measure_send(clock, pipeline, payload)))
        beat()
    return found
