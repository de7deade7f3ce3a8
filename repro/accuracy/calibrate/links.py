"""Times of collectives by payload in the groups that the engine uses, and the slowdown of concurrent computation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from repro.accuracy.calibrate.clock import OperatorClock, timing
from repro.accuracy.calibrate.plan import GroupKind
from repro.parallel.comm import MAX, Group, Work

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
OVERLAPPED = ("all_reduce", "reduce_scatter", "all_gather")
SMALL, MANY = 2**20, 3
"""Size up to which latency dominates a message, in bytes, and the factor of its repeats."""
PRODUCT_SIZE = {"cpu": 512, "cuda": 4096}
LONGER = 1.5
"""Ratio of the computation to the collective that it hides."""


class LinkBench:
    """Time messages of groups; all groups of a kind communicate at the same time."""

    def __init__(self, clock: OperatorClock, largest: int):
        """Allocate two buffers of `largest` bytes, of which all messages are parts."""
        self.clock = clock
        world = clock.group.size
        count = max(1, largest // 4 // world) * world
        # The sum of zeros cannot overflow.
        self._one, self._other = (torch.zeros(count, device=clock.device) for _ in range(2))

    def by_payload(
        self,
        kinds: Mapping[GroupKind, Group],
        pipelines: Mapping[str, Group],
        payloads: Sequence[int],
        beat: Callable[[], None],
        collectives: Sequence[str] = COLLECTIVES,
    ) -> list[dict[str, Any]]:
        """Return a row for each collective of each kind of group, and for a message to the next stage at each place.

        A row has `op`, `place`, the numbers of the kind, and `points` as (payload, timing) in the ledger's bytes. The
        measurements take turns, so that a short disturbance affects one repeat of many. `beat` is called at every turn.
        """
        rows: list[dict[str, Any]] = []
        runs: dict[tuple[int, int], Callable[[], None]] = {}
        for kind, group in kinds.items():
            for op in collectives:
                runs |= {(len(rows), payload): self._run(op, payload, group) for payload in payloads}
                rows.append({"op": op, "place": kind.place, **kind._asdict(), "points": []})
        for place, pipeline in pipelines.items():
            runs |= {(len(rows), payload): self._messages(payload, pipeline) for payload in payloads}
            rows.append({"op": "send", "place": place, "points": []})
        seconds: dict[tuple[int, int], list[float]] = {key: [] for key in runs}
        for run in runs.values():
            run()
        for turn in range(MANY * self.clock.repeats):
            for (row, payload), run in runs.items():
                if payload > SMALL and turn >= self.clock.repeats:
                    continue
                # Both ways, by all pairs of stages at once.
                ways = 2 if rows[row]["op"] == "send" else 1
                seconds[row, payload].append(self._seconds(run, payload) / ways)
                beat()
        for (row, payload), sample in seconds.items():
            rows[row]["points"].append((payload, timing(sample)))
        return rows

    def overlap_cost(self, op: str, payload: int, group: Group, beat: Callable[[], None]) -> float:
        """Return the slowdown of products that hide a collective, as a fraction of its seconds; 0 to 1.

        `beat` is called after each repeat.
        """
        start = self._start(op, payload, group)
        kind = self.clock.device.type
        dtype = torch.float16 if kind == "cuda" else torch.float32
        size = PRODUCT_SIZE[kind]
        x = torch.full((size, size), 1.0 / size, dtype=dtype, device=self.clock.device)

        def products(count: int) -> None:
            y: Tensor = x
            for _ in range(count):
                y = x @ y

        def both() -> None:
            work = start()
            products(count)
            work.wait()

        def alone() -> None:
            start().wait()

        alone()
        products(1)
        rounds = range(self.clock.repeats)
        communication = self._slowest([self._seconds(alone, payload) for _ in rounds])
        one = self._slowest([self._seconds(lambda: products(1), payload) for _ in rounds])
        count = max(1, math.ceil(LONGER * communication / one))
        lost = []
        for _ in rounds:
            lost.append(-self._seconds(lambda: products(count), payload) + self._seconds(both, payload))
            beat()
        return min(1.0, max(0.0, median(lost) / communication))

    def message_s(self, op: str, group: Group) -> float:
        """Return the processor seconds of this thread for a collective, with empty caches and crowded cores."""
        run = self._run(op, 4 * group.size, group)
        run()
        found = []
        for _ in range(MANY * self.clock.repeats):
            self.clock.flush()
            group.barrier()
            began = time.thread_time()
            run()
            found.append(time.thread_time() - began)
        return median(found) * self.clock.ranks_per_core

    def _start(self, op: str, payload: int, group: Group) -> Callable[[], Work]:
        """Return a function that starts `op` on a message of `payload` bytes."""
        part = max(1, payload // 4 // group.size)
        full, mine = self._one[: part * group.size], self._other[:part]
        starts: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: group.all_reduce(full),
            "reduce_scatter": lambda: group.reduce_scatter(mine, full),
            "all_gather": lambda: group.all_gather(full, mine),
            "broadcast": lambda: group.broadcast(full, 0),
        }
        return starts[op]

    def _run(self, op: str, payload: int, group: Group) -> Callable[[], None]:
        """Return a function that starts `op` and waits."""
        start = self._start(op, payload, group)
        return lambda: start().wait()

    def _messages(self, payload: int, pipeline: Group) -> Callable[[], None]:
        """Return a function that sends a message to the next stage and receives one."""
        message, back = (buffer[: max(1, payload // 4)] for buffer in (self._one, self._other))
        first = pipeline.rank % 2 == 0
        peer = pipeline.rank + (1 if first else -1)

        def there_and_back() -> None:
            if peer >= pipeline.size:
                return
            if first:
                work = pipeline.send(message, peer, 0)
                pipeline.receive(back, peer, 1).wait()
            else:
                pipeline.receive(back, peer, 0).wait()
                work = pipeline.send(message, peer, 1)
            work.wait()

        return there_and_back

    def _seconds(self, run: Callable[[], None], payload: int) -> float:
        """Return the seconds of `run`, which all ranks start together; the mean of several calls of a short one.

        The number of calls follows from the payload, because all ranks must make the same calls.
        """
        calls = 5 if payload <= 2**16 else 2 if payload <= SMALL else 1
        self.clock.flush()
        self.clock.synchronize()
        self.clock.group.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        self.clock.synchronize()
        return (time.perf_counter() - began) / calls

    def _slowest(self, seconds: Sequence[float]) -> float:
        """Return the largest of the ranks' medians, the same on all ranks."""
        shared = torch.tensor(median(seconds), device=self.clock.device)
        self.clock.group.all_reduce(shared, MAX).wait()
        return float(shared)
