"""Table of `make bench-gpu`: printed after all cases, and stored in the folder of the variable KERNEL_RECORDS."""

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
"""Results of this session's benchmarks: the rows of the table, and the bandwidth of a copy in bytes/s ("copy")."""
RECORDS = "KERNEL_RECORDS"


def record(rows: Sequence[BenchRow], copy: float, device: str, provenance: dict[str, Any]) -> KernelsRecord:
    """Return the record of the table's numbers and their provenance."""
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
    """Return the dictionary that collects the rows; write the record at the end of the session."""
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
