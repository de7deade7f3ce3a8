"""The suites that come with the harness."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import suites
from repro.claims.reader import load as load_ledger

FILES = sorted((Path(__file__).parents[2] / "suites").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_suite_is_sound_and_serves_claims_that_exist(path: Path) -> None:
    suite = suites.load(path)
    assert suite.name == path.stem
    assert suite.description
    ids = {claim.id for claim in load_ledger().claims}
    assert set(suite.claims) <= ids
    assert len(set(suite.claims)) == len(suite.claims)


def test_smoke_shows_what_it_promises() -> None:
    suite = suites.load(next(path for path in FILES if path.stem == "smoke"))
    names = {entry.experiment.name for entry in suite.entries}
    assert {f"states-z{z}-dp{dp}" for z in range(4) for dp in (1, 2, 4)} <= names
    assert {f"parity-z{z}-tp2-dp2" for z in range(4)} <= names
    assert all(entry.experiment.system == "local" for entry in suite.entries)
    compared = {(row.baseline, subject) for row in suite.comparisons for subject in row.subjects}
    assert ("speed-torch-z0-dp2", "speed-z0-dp2") in compared
    assert suite.entry("limit-z0-dp2").expect == "oom"
