"""Where every rank is, in shared memory: a rank writes in about a microsecond, the launcher reads at will.

One file holds a slot per rank, mapped by all.  Nothing is locked: each field has one writer, and a read
that meets a write is at worst one event old.  When a rank is killed or stops, its slot still says where.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from repro.config.enums import Phase

_PHASES = tuple(Phase)
_NUMBER = {phase: number for number, phase in enumerate(_PHASES)}
_PHASE = struct.Struct("=iiqd")  # experiment, phase, step, seconds
_COLLECTIVE = struct.Struct("=qd24s24s")  # sequence, seconds, operation, group
_SLOT = 128


class Position(NamedTuple):
    """What a rank said last."""

    experiment: int
    step: int
    phase: Phase
    sequence: int
    """Number of its last collective, 0 before the first."""
    op: str
    group: str
    seconds: float
    """`time.monotonic()` of its last word; 0.0 if it has said nothing."""

    @property
    def begun(self) -> bool:
        """Whether the rank has entered an experiment."""
        return self.phase != Phase.START

    def __str__(self) -> str:
        if not self.begun:
            return "at start-up"
        place = f"at step {self.step}, {self.phase}"
        return f"{place}, after {self.op} #{self.sequence} on {self.group}" if self.op else place


class Beacon:
    """The writing side, one per rank; the rank's code calls it on every phase and every collective."""

    def __init__(self, path: Path, rank: int, keep: Callable[[int, dict[str, Any]], None] | None = None):
        self._map = _open(path)
        self._phase_at = rank * _SLOT
        self._collective_at = rank * _SLOT + _PHASE.size
        self._keep = keep

    def phase(self, experiment_index: int, step: int, phase: Phase) -> None:
        """The rank enters `phase` of `step` of an experiment of its job."""
        _PHASE.pack_into(self._map, self._phase_at, experiment_index, _NUMBER[phase], step, time.monotonic())

    def collective(self, sequence: int, op: str, group: str) -> None:
        """The rank issues its `sequence`-th collective: `op` over `group`."""
        _COLLECTIVE.pack_into(
            self._map, self._collective_at, sequence, time.monotonic(), op.encode(), group.encode()
        )

    def finished(self, experiment_index: int, result: dict[str, Any]) -> None:
        """Hand in one experiment's `RankResult` early: a later failure in the job then cannot lose it."""
        if self._keep is not None:
            self._keep(experiment_index, result)


class Lookout:
    """The reading side: all ranks of one launch."""

    def __init__(self, path: Path, world: int):
        with open(path, "wb") as file:
            file.truncate(world * _SLOT)
        self._map = _open(path)

    def position(self, rank: int) -> Position:
        """Where `rank` is."""
        experiment, number, step, said = _PHASE.unpack_from(self._map, rank * _SLOT)
        sequence, issued, op, group = _COLLECTIVE.unpack_from(self._map, rank * _SLOT + _PHASE.size)
        return Position(
            experiment, step, _PHASES[number], sequence, _text(op), _text(group), max(said, issued)
        )

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _open(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()
