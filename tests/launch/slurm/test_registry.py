"""A submission's name says when and of what it is, and its arrays which job a bundle is."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timezone

from tests.launch.slurm.submitted import ThreeCases


def test_a_submissions_name_sorts_by_time_and_says_what_it_is(submitted: ThreeCases) -> None:
    made = submitted.registry.new_id("a suite: of / signs" + "x" * 60)
    time, clean, digits = re.fullmatch(r"(\d{8}T\d{6}Z)-(.{40})-([0-9a-f]+)", made).groups()  # type: ignore[union-attr]
    assert clean == "a-suite-of-signs" + "x" * 24
    assert len(digits) == 4
    at = datetime.strptime(time, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    assert abs((datetime.now(timezone.utc) - at).total_seconds()) < 60
    array = submitted.submission.arrays[0]
    assert submitted.submission.jobs() == {0: "12_0", 1: "12_1", 2: "12_2"}
    assert replace(array, bundles=[4]).element(0) == "12"
    waiting = replace(submitted.submission, arrays=[array, replace(array, bundles=[3, 4], job_id="")])
    assert waiting.jobs() == {0: "12_0", 1: "12_1", 2: "12_2", 3: "", 4: ""}
    assert waiting.with_job(1, "13").jobs() == {0: "12_0", 1: "12_1", 2: "12_2", 3: "13_0", 4: "13_1"}
