"""Benchmark of `repro submit --dry-run` and `repro status` with 500 cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from tests.launch.runs import experiments, write_suite
from tests.launch.slurm.conftest import FakeSlurm, site, slurm

__all__ = ["site", "slurm"]  # fixtures
CASES = 500
LIMIT_S = 2.0


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_suite(tmp_path, experiments(*(f"case-{i}" for i in range(CASES))))


def test_dry_run_of_500_cases(
    benchmark: Any, suite: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = str(tmp_path / "results")
    arguments = ["submit", str(suite), "--profile", str(site), "--results", results, "--dry-run", "--json"]
    benchmark.pedantic(lambda: cli.main(arguments), rounds=3)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]) == CASES
    assert benchmark.stats.stats.median < LIMIT_S


def test_status_of_500_cases(
    benchmark: Any,
    suite: Path,
    site: Path,
    slurm: FakeSlurm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = str(tmp_path / "results")
    assert cli.main(["submit", str(suite), "--profile", str(site), "--results", results]) == 0
    benchmark.pedantic(lambda: cli.main(["status", "--results", results, "--json"]), rounds=3)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]) == CASES
    assert benchmark.stats.stats.median < LIMIT_S
