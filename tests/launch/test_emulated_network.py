"""What a rank on an emulated network hands in, and when the ranks are no equal devices; without a network."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.config import EmulatedNetwork
from repro.config.network import CORES_SHARE
from repro.launch.rank import emulated_network
from repro.launch.rank.emulated_network import EmulatedNetworkRank
from tests.clock import Clock

NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=2, between=1e6)


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the launcher knows of the network, in whose place the ranks' rates are."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"nodes": [11, 12], "cores": 2}))
    monkeypatch.setattr(
        emulated_network, "_compute_rates", lambda world, throttle: [1e9, 2e9, 3e9, 4e9][:world]
    )
    monkeypatch.setattr(emulated_network, "MAX_RATE_SPREAD", 1.2)
    monkeypatch.setattr(emulated_network.CoreAssignment, "apply", lambda self: None)
    monkeypatch.setattr(emulated_network.processes, "keep_freed_memory", lambda: None)
    return path


def test_bytes_are_a_steps_and_a_nodes_first_rank_speaks_for_it(facts: Path) -> None:
    for rank, grown, node, known in (
        (0, [10, 20, 30, 40], (15, 20), True),
        (1, [10, 20], (None, None), False),
        (2, [10, 20, 30, 40], (15, 20), False),
    ):
        seen = EmulatedNetworkRank(NETWORK, facts, rank)
        seen.throttle.stop()
        said = seen.report(grown, steps=2)
        assert (said.sent_bytes, said.received_bytes) == (5, 10)
        assert (said.node_sent_bytes, said.node_received_bytes) == node
        assert said.facts == (json.loads(facts.read_text()) if known else None)
        assert said.compute_flops_per_s == (1 + rank) * 1e9
        assert said.core_share == CORES_SHARE * 1 / 4, "one of the two cores carries messages"


@pytest.mark.parametrize(
    ("nodes", "rank", "files"),
    [
        (2, 0, ["/proc/self/net/dev", "/proc/11/net/dev"]),
        (2, 1, ["/proc/self/net/dev"]),
        (2, 2, ["/proc/self/net/dev", "/proc/12/net/dev"]),
        (1, 0, ["/proc/self/net/dev"]),
    ],
)
def test_bytes_are_counted_where_they_leave_a_rank_and_its_node(
    facts: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, rank: int, files: list[str]
) -> None:
    links = {"between": 1e6} if nodes > 1 else {"within": 1e6}
    seen = EmulatedNetworkRank(EmulatedNetwork(nodes=nodes, ranks_per_node=2, **links), facts, rank)
    seen.throttle.stop()
    read: list[str] = []

    class File:
        def __init__(self, name: str):
            self.name = name

        def read_text(self) -> str:
            read.append(self.name)
            own = (
                "  eth0: 10 1 2 3 4 5 6 7 20 8\n" if "self" in self.name else "uplink:30 1 2 3 4 5 6 7 40 8\n"
            )
            return "Inter-| Receive | Transmit\n    lo: 1 1 1 1 1 1 1 1 1 1\n" + own

    monkeypatch.setattr(emulated_network, "Path", File)
    assert seen.counters() == [20, 10, 40, 30][: 2 * len(files)]
    assert read == files
    with pytest.raises(OSError, match="/proc/self/net/dev has no interface eth1"):
        emulated_network._counters("/proc/self/net/dev", "eth1")


def test_rates_are_of_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is held to its share has the time of that too."""
    clock = Clock().rules(monkeypatch, emulated_network)
    done: list[Any] = []

    def flop_in(seconds: float, timer: Any) -> float:
        assert (seconds, timer) == (emulated_network.RATE_PROBE_S, clock.perf_counter)
        done.append("computed")
        clock.now += 0.5
        return 8e9

    def settle() -> None:
        clock.now += 1.5

    def all_gather(rates: list[torch.Tensor], mine: torch.Tensor) -> None:
        for rank, rate in enumerate(rates):
            rate.copy_(mine * (1 + rank))

    monkeypatch.setattr(emulated_network.compute_rate, "count_flop", flop_in)
    monkeypatch.setattr(emulated_network.dist, "barrier", lambda: done.append("all there"))
    monkeypatch.setattr(emulated_network.dist, "all_gather", all_gather)
    throttle: Any = SimpleNamespace(settle=settle)
    assert emulated_network._compute_rates(3, throttle) == [4e9, 8e9, 12e9]
    assert done == ["all there", "computed"]


def test_ranks_have_some_attempts_to_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def rates(world: int, throttle: object) -> list[float]:
        tries.append(world)
        return [1.0, 1.0] if len(tries) == emulated_network.MAX_RATE_ATTEMPTS else [1.0, 2.0]

    monkeypatch.setattr(emulated_network, "_compute_rates", rates)
    nobody: Any = None
    assert emulated_network._equal_rates(2, nobody) == [1.0, 1.0]
    assert len(tries) == emulated_network.MAX_RATE_ATTEMPTS
    with pytest.raises(RuntimeError):
        emulated_network._equal_rates(2, nobody)
    assert len(tries) == 2 * emulated_network.MAX_RATE_ATTEMPTS


def test_ranks_of_unequal_rates_are_refused(facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest and the slowest are three apart, the mean is two and a half."""
    monkeypatch.setattr(emulated_network, "MAX_RATE_SPREAD", 1.19)
    with pytest.raises(RuntimeError, match=r"1 to 4 GFLOP/s, are 120% of their mean apart and not 119% at"):
        EmulatedNetworkRank(NETWORK, facts, 0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "the timer would kill the process at its end"
