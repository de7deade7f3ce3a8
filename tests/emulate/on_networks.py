"""Suites on a small emulated network, and their records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repro.emulate.network import ETHERNET_BYTES, HEADER_BYTES
from repro.results.record_parts import NetworkReport
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from tests.launch import runs

NETWORK = """
[networks.slow]
nodes = 2
ranks_per_node = 2
between = 8e6
"""


def suite(folder: Path, body: str) -> Path:
    """Write a suite with a model whose messages are larger than their headers."""
    path = runs.write_suite(folder, NETWORK + body, limits="hang_s = 60")
    (folder / "tiny.toml").write_text("layers = 2\nhidden = 128\nheads = 4\nvocab = 512\nseq = 64\n")
    return path


def run(path: Path, results: Path) -> tuple[int, str]:
    """Return the exit code and the standard error of `repro run`."""
    process = runs.start(path, results, fake=False)
    code, _, err = runs.finish(process)
    return code, err


def experiments(results: Path) -> Iterator[ExperimentRecord]:
    """Yield the records of experiments in a store."""
    with Store(results) as store:
        yield from (record for record in store.records() if isinstance(record, ExperimentRecord))


def most_over_ledger(network: NetworkReport) -> float:
    """Return the maximum ratio of interface bytes to ledger bytes, with a header and an acknowledgement per packet."""
    packet = network.mtu - HEADER_BYTES
    return (packet + 2 * (HEADER_BYTES + ETHERNET_BYTES)) / packet
