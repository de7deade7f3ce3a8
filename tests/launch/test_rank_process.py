"""Tests of heartbeats: the launcher reads the last position that each rank wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repro.config.enums import Phase
from repro.launch.rank_process import HeartbeatReader, HeartbeatWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat"


def test_each_rank_has_a_separate_position(path: Path) -> None:
    heartbeats = HeartbeatReader(path, 3)
    HeartbeatWriter(path, 2).phase(1, 7, "backward")
    HeartbeatWriter(path, 0).collective(123, "reduce_scatter", "dp")
    assert not heartbeats.position(1).begun
    assert str(heartbeats.position(1)) == "at start-up"
    assert heartbeats.position(2)[:3] == (1, 7, "backward")
    assert heartbeats.position(0).sequence == 123


def test_position_text_names_step_phase_and_collective(path: Path) -> None:
    heartbeats = HeartbeatReader(path, 1)
    heartbeat = HeartbeatWriter(path, 0)
    heartbeat.phase(0, 7, "backward")
    assert str(heartbeats.position(0)) == "at step 7, backward"
    heartbeat.collective(123, "all_gather", "dp")
    assert str(heartbeats.position(0)) == "at step 7, backward, after all_gather #123 on dp"


def test_every_heartbeat_counts_as_progress(path: Path) -> None:
    heartbeats = HeartbeatReader(path, 1)
    heartbeat = HeartbeatWriter(path, 0)
    seen = [heartbeats.position(0).seconds]
    for phase in Phase:
        heartbeat.phase(0, 1, phase)
        seen.append(heartbeats.position(0).seconds)
        heartbeat.collective(1, "all_reduce", "tp")
        seen.append(heartbeats.position(0).seconds)
    assert seen == sorted(set(seen))


def test_finished_results_reach_the_callback(path: Path) -> None:
    HeartbeatReader(path, 1)
    results: list[tuple[int, dict[str, Any]]] = []
    HeartbeatWriter(path, 0, lambda index, result: results.append((index, result))).finished(3, {"rank": 0})
    assert results == [(3, {"rank": 0})]
    HeartbeatWriter(path, 0).finished(3, {"rank": 0})  # without a callback, the result is dropped
