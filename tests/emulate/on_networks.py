"""Suites on a small emulated network, and what their records say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repro.config import EmulatedNetwork
from repro.emulate.network import ETHERNET_BYTES, HEADER_BYTES
from repro.results.record_parts import NetworkReport
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from repro.util import processes
from tests.launch import runs

NETWORK = """
[networks.slow]
nodes = 2
ranks_per_node = 2
between = 8e6
"""
TOO_FAST = EmulatedNetwork(nodes=min(4 * processes.usable_cores(), 200), ranks_per_node=1, between=4e9)
"""Half of the nodes send at once, two of them for each core; a core that does nothing else carries one such link."""


def suite(folder: Path, body: str) -> Path:
    """A suite with a model whose messages are larger than their headers."""
    path = runs.write_suite(folder, NETWORK + body, limits="hang_s = 60")
    (folder / "tiny.toml").write_text("layers = 2\nhidden = 128\nheads = 4\nvocab = 512\nseq = 64\n")
    return path


def run(path: Path, results: Path) -> tuple[int, str]:
    """Exit code and errors."""
    process = runs.start(path, results, fake=False)
    code, _, err = runs.finish(process)
    return code, err


def experiments(results: Path) -> Iterator[ExperimentRecord]:
    """Records of experiments."""
    with Store(results) as store:
        yield from (record for record in store.records() if isinstance(record, ExperimentRecord))


def most_over_ledger(network: NetworkReport) -> float:
    """Data has a header for each packet at most, and an acknowledgement comes back for each at most."""
    packet = network.mtu - HEADER_BYTES
    return (packet + 2 * (HEADER_BYTES + ETHERNET_BYTES)) / packet
