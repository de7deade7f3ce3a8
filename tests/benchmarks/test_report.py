"""Benchmark of `repro report` and `repro export` on a store of 10,000 records, in a separate process.

    make benchmarks PYTEST_ARGS='-k report'

Target: 60 s on two cores.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report import large

RECORDS = 10_000
REPRO = (sys.executable, "-c", "import sys, repro.cli; sys.exit(repro.cli.main())")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large.store(tmp_path_factory.mktemp("large") / "results", RECORDS)


def test_report_of_10000_records(benchmark: Any, results: Path, tmp_path: Path) -> None:
    benchmark.group = "repro report, 10,000 records"

    def run_report() -> None:
        command = [*REPRO, "report", "--results", str(results), "--out", str(tmp_path)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)

    benchmark.pedantic(run_report, rounds=2, iterations=1)
    benchmark.extra_info["records_bytes"] = (tmp_path / "records.js").stat().st_size
    benchmark.extra_info["store_bytes"] = sum(path.stat().st_size for path in results.rglob("*.jsonl"))


@pytest.mark.parametrize("table", ["values", "experiments", "records"])
def test_export_of_10000_records(benchmark: Any, results: Path, tmp_path: Path, table: str) -> None:
    benchmark.group = "repro export, 10,000 records"
    command = [*REPRO, "export", "--results", str(results), "--table", table]
    command += ["--format", "csv", "--output", str(tmp_path / "out.csv")]
    benchmark.pedantic(
        lambda: subprocess.run(command, check=True, capture_output=True, timeout=300), rounds=2, iterations=1
    )
