"""Benchmark of `repro report` and `repro export` on 10,000 records, and of updates of `reports/09_explore.py`.

    make benchmarks PYTEST_ARGS=tests/benchmarks/test_report.py

Targets: 60 s on two cores for 10,000 records, and 0.5 s of CPU time for the text of the interactive notebook for models
from 1.5B to 175B.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from repro.report.page import build
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


LAYOUTS: dict[str, dict[str, Any]] = {
    "1.5B on 64": {"model": "gpt2-1.5b", "tp": 1, "pp": 1, "micro_batch": 8, "micro_batches": 1},
    "17B on 64": {"model": "turing-nlg-17b", "tp": 4, "pp": 1, "zero": 2, "micro_batches": 1},
    "70B on 64, 4 stages": {},
    "175B on 1024, 8 stages": {"model": "megatron-175b", "system": "selene", "gpus": 1024, "pp": 8},
}
"""Layout keys that differ from the notebook's initial state."""
TEXT_LIMIT_S = 0.5


@pytest.fixture(scope="module")
def scope() -> dict[str, Any]:
    """Return the functions of the notebook; its last cell, which creates the controls, does not run."""
    found: dict[str, Any] = {"__name__": "__main__"}
    source = build.read_notebook(build.NOTEBOOKS_FOLDER / "09_explore.py")
    for cell in source.cells[:-1]:
        if cell.cell_type == "code":
            exec(compile(cell.source, "09_explore.py", "exec"), found)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("output", ["text", "figure"])
@pytest.mark.benchmark(timer=time.process_time)
def test_update_of_text_and_figure(benchmark: Any, scope: dict[str, Any], name: str, output: str) -> None:
    benchmark.group = f"explore layouts, {output}"
    layout = {**scope["FIRST"], **LAYOUTS[name]}
    if output == "figure":
        found = scope["simulate_layout"](**layout)
        benchmark.pedantic(scope["draw"], args=(found,), rounds=5, warmup_rounds=1)
    else:
        benchmark.pedantic(
            lambda: scope["describe"](scope["simulate_layout"](**layout)), rounds=5, warmup_rounds=1
        )
        assert benchmark.stats.stats.min < TEXT_LIMIT_S
