"""The table of `make bench-gpu`, printed when all cases have run, and stored where KERNEL_RECORDS says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.measure.provenance import provenance
from repro.results.schema import KernelsRecord
from repro.results.store import Store
from tests.gpu.bench.timing import BenchRow, as_data, render_table

MEASURED: dict[str, Any] = {"rows": []}
"""What the benchmarks of this session leave: their rows, and the bandwidth of a copy."""
RECORDS = "KERNEL_RECORDS"


def record(rows: Sequence[BenchRow], copy: float, device: str, provenance: dict[str, Any]) -> KernelsRecord:
    """The table's numbers, and where they come from."""
    return KernelsRecord(
        suite="bench-gpu",
        name=f"kernels on {device}",
        evidence="measured",
        device=device,
        copy_bytes_per_s=copy,
        rows=as_data(rows),
        provenance=provenance,
    )


@pytest.fixture(scope="session")
def measured() -> Iterator[dict[str, Any]]:
    """Where benchmarks put their rows; the record is written at the end of the session."""
    yield MEASURED
    folder = os.environ.get(RECORDS)
    if folder and MEASURED["rows"]:
        with Store(Path(folder)) as store:
            device = torch.cuda.get_device_name()
            store.append(record(MEASURED["rows"], MEASURED["copy"], device, provenance()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    if MEASURED["rows"]:
        terminalreporter.write_sep("=", "kernels")
        for line in render_table(MEASURED["rows"], MEASURED["copy"]):
            terminalreporter.write_line(line)
