"""Benchmark of `repro submit --dry-run` and `repro status` with 500 cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from tests.launch.runs import experiments, write_suite
from tests.launch.slurm.conftest import site, slurm

__all__ = ["site", "slurm"]  # fixtures
CASES = 500
LIMIT_S = 2.0


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("command", ["submit --dry-run", "status"])
def test_dry_run_and_status_of_500_cases(
    benchmark: Any, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    suite = write_suite(tmp_path, experiments(*(f"case-{i}" for i in range(CASES))))
    results = ["--results", str(tmp_path / "results")]
    submit = ["submit", str(suite), "--profile", str(site), *results]
    if command == "status":
        assert cli.main(submit) == 0
    timed = ["status", *results, "--json"] if command == "status" else [*submit, "--dry-run", "--json"]
    benchmark.pedantic(lambda: cli.main(timed), rounds=3)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]) == CASES
    assert benchmark.stats.stats.median < LIMIT_S
