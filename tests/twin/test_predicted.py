"""Predictions of runs on emulated networks: as records of a store, and beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import suites
from repro.calibrate import toml
from repro.config.system import System
from repro.launch import simulated
from repro.results.store import read
from repro.twin.derive import Twin
from repro.twin.suite import Named, text
from tests.records import latest
from tests.twin.conftest import tables


@pytest.mark.slow
def test_the_records_of_a_twin_have_the_seconds_of_its_network(
    machine: System, lowbw: Twin, tmp_path: Path
) -> None:
    here, file = tmp_path / "here.toml", tmp_path / "windtunnel_x.toml"
    here.write_text(toml.text(tables()))
    file.write_text(text([Named(lowbw)], file=str(file), name="windtunnel_x", arguments="", claims=()))
    suite = suites.load(file)
    results = tmp_path / "results"
    list(simulated.run([(suite, list(suite.entries))], results, str(here), rerun=False))
    found = {
        line["name"]: line["metrics"]["step_seconds.median"] for line in latest(results, "simulated").values()
    }
    assert found == {
        f"{member.original.name}@here": pytest.approx(member.after.step_s) for member in lowbw.members
    }
    assert all(record.experiment.network is not None for record in read(results))  # type: ignore[union-attr]
