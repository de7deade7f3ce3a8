"""Tests of the calibration file: TOML tables are read back, and measurements of ranks become one number."""

from __future__ import annotations

from repro.accuracy.calibrate import document, fit
from repro.accuracy.calibrate.document import _gpu
from repro.config.files import tomllib


def test_written_tables_are_read_back() -> None:
    """The tables contain names with dots, numbers with sources, lists of points and text with quotes."""
    tables = {
        "note": 'it is a "note" — \\ here',
        "nodes": {"value": 1, "source": "this machine"},
        "device": {
            "name": "x",
            "operators": {"aten.mm": {"fixed_s": 1.5e-06, "per_flop_s": 0.0}, "matmul": {"fixed_s": 1e-5}},
        },
        "links": {
            "memory": {"per": "device", "collectives": {"send": {"points": [[1024, 1e-4], [4096, 2.5e-4]]}}}
        },
        "flag": True,
    }
    assert tomllib.loads(document.toml_text(tables)) == tables


def test_smaller_payload_takes_no_longer_than_a_larger_one() -> None:
    """The slowest rank counts. A disturbed small message gets the seconds of the next larger message."""

    def row(*seconds: float) -> list[list[object]]:
        return [[2**10 * 4**i, [s, s, s, 5]] for i, s in enumerate(seconds)]

    found = fit.collective_points([row(9e-4, 2e-4, 3e-4), row(1e-4, 1e-4, 5e-4)])
    assert found == [[2**10, 2e-4], [2**12, 2e-4], [2**14, 5e-4]]


def test_context_bytes_are_the_largest_of_all_ranks() -> None:
    gpu = {"name": "A", "compute_capability": "9.0", "memory_bytes": 80}
    machine = {"gpus": [gpu], "memory": {"total_bytes": 100}, "nvlink": True}
    found = _gpu([{"machine": machine, "context_bytes": size} for size in (5, 7, 6)])
    assert found["context_bytes"]["value"] == 7
    assert found["context_bytes"]["source"].startswith("measured: memory in use outside torch")
