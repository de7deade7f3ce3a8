"""What a rank on an emulated network hands in, and when the ranks are no equal devices; without a network."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from repro.config import EmulatedNetwork
from repro.launch.rank import on_network
from repro.launch.rank.on_network import OnNetwork

NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=2, between=1e6)


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the launcher knows of the network, in whose place the ranks' rates are."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"nodes": [11, 12], "cores": 2}))
    monkeypatch.setattr(on_network, "_compute_rates", lambda world, pace: [1e9, 2e9, 3e9, 4e9][:world])
    monkeypatch.setattr(on_network, "SPREAD", 1.2)
    return path


def test_bytes_are_a_steps_and_a_nodes_first_rank_speaks_for_it(facts: Path) -> None:
    for rank, grown, node, known in (
        (0, [10, 20, 30, 40], (15, 20), True),
        (1, [10, 20], (None, None), False),
        (2, [10, 20, 30, 40], (15, 20), False),
    ):
        seen = OnNetwork(NETWORK, facts, rank)
        seen.pace.stop()
        said = seen.report(grown, steps=2)
        assert (said.sent_bytes, said.received_bytes) == (5, 10)
        assert (said.node_sent_bytes, said.node_received_bytes) == node
        assert said.facts == (json.loads(facts.read_text()) if known else None)
        assert said.compute_flops_per_s == (1 + rank) * 1e9
        assert said.core_share == 0.75 * 2 / 4


def test_ranks_of_unequal_rates_are_refused(facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest and the slowest are three apart, the mean is two and a half."""
    monkeypatch.setattr(on_network, "SPREAD", 1.19)
    with pytest.raises(RuntimeError, match=r"1 to 4 GFLOP/s, are 120% of their mean apart and not 119% at"):
        OnNetwork(NETWORK, facts, 0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "the timer would kill the process at its end"
