"""Beacons cost next to nothing, and the launcher reads what was said last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repro.config.enums import Phase
from repro.launch.rank_process import HeartbeatReader, HeartbeatWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat"


def test_each_rank_has_its_own_place(path: Path) -> None:
    heartbeats = HeartbeatReader(path, 3)
    HeartbeatWriter(path, 2).phase(1, 7, "backward")
    HeartbeatWriter(path, 0).collective(123, "reduce_scatter", "dp")
    assert not heartbeats.position(1).begun
    assert str(heartbeats.position(1)) == "at start-up"
    assert heartbeats.position(2)[:3] == (1, 7, "backward")
    assert heartbeats.position(0).sequence == 123


def test_a_position_reads_as_a_sentence(path: Path) -> None:
    heartbeats = HeartbeatReader(path, 1)
    heartbeat = HeartbeatWriter(path, 0)
    heartbeat.phase(0, 7, "backward")
    assert str(heartbeats.position(0)) == "at step 7, backward"
    heartbeat.collective(123, "all_gather", "dp")
    assert str(heartbeats.position(0)) == "at step 7, backward, after all_gather #123 on dp"


def test_every_word_is_progress(path: Path) -> None:
    heartbeats = HeartbeatReader(path, 1)
    heartbeat = HeartbeatWriter(path, 0)
    seen = [heartbeats.position(0).seconds]
    for phase in Phase:
        heartbeat.phase(0, 1, phase)
        seen.append(heartbeats.position(0).seconds)
        heartbeat.collective(1, "all_reduce", "tp")
        seen.append(heartbeats.position(0).seconds)
    assert seen == sorted(set(seen))


def test_finished_results_reach_the_keeper(path: Path) -> None:
    HeartbeatReader(path, 1)
    kept: list[tuple[int, dict[str, Any]]] = []
    HeartbeatWriter(path, 0, lambda index, result: kept.append((index, result))).finished(3, {"rank": 0})
    assert kept == [(3, {"rank": 0})]
    HeartbeatWriter(path, 0).finished(3, {"rank": 0})  # nobody keeps it: no harm
