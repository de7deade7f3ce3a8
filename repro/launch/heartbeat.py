"""Heartbeats of ranks: the position of every rank in shared memory, written by the rank and read by its launcher.

One file holds a slot per rank. A write takes about a microsecond and needs no lock, because each field has one writer.
The slot of a killed or stopped rank still names its last position.
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
    """Last reported position of a rank."""

    experiment: int
    step: int
    phase: Phase
    sequence: int
    """Number of its last collective, 0 before the first."""
    op: str
    group: str
    seconds: float
    """`time.monotonic()` of the last report; 0.0 before the first."""

    @property
    def begun(self) -> bool:
        """Whether the rank has entered an experiment."""
        return self.phase != Phase.START

    def __str__(self) -> str:
        if not self.begun:
            return "at start-up"
        place = f"at step {self.step}, {self.phase}"
        return f"{place}, after {self.op} #{self.sequence} on {self.group}" if self.op else place


class HeartbeatWriter:
    """Writer of one rank's slot. The rank calls it at every phase and every collective."""

    def __init__(self, path: Path, rank: int, keep: Callable[[int, dict[str, Any]], None] | None = None):
        self._map = _open(path)
        self._phase_at = rank * _SLOT
        self._collective_at = rank * _SLOT + _PHASE.size
        self._keep = keep

    def phase(self, experiment_index: int, step: int, phase: Phase) -> None:
        """Write that the rank enters `phase` of `step` of an experiment of its job."""
        _PHASE.pack_into(self._map, self._phase_at, experiment_index, _NUMBER[phase], step, time.monotonic())

    def collective(self, sequence: int, op: str, group: str) -> None:
        """Write that the rank issues its collective number `sequence`: `op` over `group`."""
        _COLLECTIVE.pack_into(
            self._map, self._collective_at, sequence, time.monotonic(), op.encode(), group.encode()
        )

    def finished(self, experiment_index: int, result: dict[str, Any]) -> None:
        """Store the `RankResult` of one experiment before the job ends, so that a later failure cannot lose it."""
        if self._keep is not None:
            self._keep(experiment_index, result)


class HeartbeatReader:
    """Reader of the slots of all ranks of one launch."""

    def __init__(self, path: Path, world: int):
        with open(path, "wb") as file:
            file.truncate(world * _SLOT)
        self._map = _open(path)

    def position(self, rank: int) -> Position:
        """Return the position of `rank`."""
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
