"""Target of the ranks in these tests: the calibration with a small cache, whose flush takes little time."""

from __future__ import annotations

from typing import Any

from repro.accuracy.calibrate import clock, target
from repro.launch.job import Job

CACHE = 2**20


def run_rank(job: Job, **options: Any) -> dict[str, dict[str, Any]]:
    """Run `repro.accuracy.calibrate.target.run_rank` with a small cache."""
    clock.cache_bytes = lambda device: CACHE
    return target.run_rank(job, **options)
