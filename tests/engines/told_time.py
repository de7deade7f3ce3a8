"""A time of each rank that passes where a test says so, and in waits: until what is waited for was sent.

Whatever else a machine does, a schedule of passes of told lengths then has its ideal times to the last digit.  Messages
themselves take none.
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

_uses = itertools.count()
"""Ranks of a pool run the same tests, so that all of them number these alike."""


class ToldTime(Clock):
    """Stands for the module `time` of a rank's clocks, while `told_time` is open; so far, seconds since then."""

    def __init__(self) -> None:
        super().__init__(now=0.0)
        self._store = c10d._get_default_store()
        self._use = next(_uses)
        self._count: Counter[str] = Counter()
        self._awaited: dict[dist.Work, list[str]] = {}
        """Where each work's senders say when they sent."""
        self._blocking: list[str] = []
        """The same of a collective that returns when it is done."""

    def _place(self, what: str) -> str:
        """Where the next one of its like says its time: messages of a tag, and collectives, are issued in order."""
        self._count[what] += 1
        return f"time {self._use} {what} {self._count[what]}"

    def isend(self, real: Callable[..., Any], tensor: Any, dst: Any = None, **how: Any) -> Any:
        to, tag, name = _peer(dst, how.get("group_dst"), how)
        self._store.set(self._place(f"{name} {tag} {dist.get_rank()}->{to}"), repr(self.now))
        return real(tensor, dst, **how)

    def irecv(self, real: Callable[..., Any], tensor: Any, src: Any = None, **how: Any) -> Any:
        source, tag, name = _peer(src, how.get("group_src"), how)
        work = real(tensor, src, **how)
        self._awaited[work] = [self._place(f"{name} {tag} {source}->{dist.get_rank()}")]
        return work

    def all_reduce(self, real: Callable[..., Any], tensor: Any, *how: Any, **more: Any) -> Any:
        group = more.get("group") or c10d._get_default_group()
        place = self._place(f"{group.group_name} all")
        self._store.set(f"{place} {dist.get_rank()}", repr(self.now))
        self._blocking = [f"{place} {rank}" for rank in dist.get_process_group_ranks(group)]
        work = real(tensor, *how, **more)
        if work is not None:
            self._awaited[work] = self._blocking
        self._blocking = []
        return work

    def wait(self, real: Callable[..., Any], work: dist.Work, *limit: Any) -> Any:
        done = real(work, *limit)
        sent = self._awaited.pop(work, self._blocking)
        self.now = max([self.now, *(float(self._store.get(place)) for place in sent)])
        return done


def _peer(rank: int | None, in_group: int | None, how: dict[str, Any]) -> tuple[int, int, str]:
    """The other side's rank of all, the tag, and the group's name."""
    group = how.get("group") or c10d._get_default_group()
    number = dist.get_global_rank(group, in_group) if rank is None and in_group is not None else rank
    assert number is not None
    return number, how.get("tag", 0), group.group_name


@contextmanager
def told_time() -> Iterator[ToldTime]:
    """The clocks of `repro.measure.timing` go by it, and all waits for messages and all-reduces set it."""
    told, changed = ToldTime(), mock.patch.multiple
    own: dict[str, Any] = {
        "isend": partial(told.isend, dist.isend),
        "irecv": partial(told.irecv, dist.irecv),
        "all_reduce": partial(told.all_reduce, dist.all_reduce),
    }
    real_wait = dist.Work.wait

    def wait(work: dist.Work, *limit: Any) -> Any:
        return told.wait(real_wait, work, *limit)

    with changed(dist, **own), changed(c10d, **own), changed(timing, time=told):
        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield told
        finally:
            dist.Work.wait = real_wait  # type: ignore[method-assign]
