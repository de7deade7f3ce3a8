"""A virtual clock per rank, which advances in `sleep`, and in a wait until the awaited message was sent.

A schedule with fixed durations of passes therefore has its exact ideal times on every machine. Messages take no time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from repro.measure import timing
from tests.clock import Clock

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
