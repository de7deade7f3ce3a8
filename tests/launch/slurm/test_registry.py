"""Tests of the ids of submissions and of the job ids of their bundles."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timezone

from tests.launch.slurm.submitted import ThreeCases


def test_submission_id_contains_time_and_suite_name(submitted: ThreeCases) -> None:
    found = submitted.registry.new_id("a suite: of / signs" + "x" * 60)
    time, name, digits = re.fullmatch(r"(\d{8}T\d{6}Z)-(.{40})-([0-9a-f]+)", found).groups()  # type: ignore[union-attr]
    assert name == "a-suite-of-signs" + "x" * 24
    assert len(digits) == 4
    created = datetime.strptime(time, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    assert abs((datetime.now(timezone.utc) - created).total_seconds()) < 60
    array = submitted.submission.arrays[0]
    assert submitted.submission.jobs() == {0: "12_0", 1: "12_1", 2: "12_2"}
    assert replace(array, bundles=[4]).element(0) == "12"
    waiting = replace(submitted.submission, arrays=[array, replace(array, bundles=[3, 4], job_id="")])
    assert waiting.jobs() == {0: "12_0", 1: "12_1", 2: "12_2", 3: "", 4: ""}
    assert waiting.with_job(1, "13").jobs() == {0: "12_0", 1: "12_1", 2: "12_2", 3: "13_0", 4: "13_1"}
