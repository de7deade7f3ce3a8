"""What the ranks run in these tests: the calibration of a machine with a small cache, which is soon flushed."""

from __future__ import annotations

from typing import Any

from repro.accuracy.calibrate import clock, target
from repro.launch.job import Job

CACHE = 2**20


def run_rank(job: Job, **place: Any) -> dict[str, dict[str, Any]]:
    """As `repro.accuracy.calibrate.target.run_rank`."""
    clock.cache_bytes = lambda device: CACHE
    return target.run_rank(job, **place)
