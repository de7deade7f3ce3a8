"""Tests of predicted runs on emulated networks: records of a store, and predictions of measured runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.calibrate import document
from repro.accuracy.twins.derive import Twin
from repro.accuracy.twins.suite import NamedTwin
from repro.accuracy.validate.machine import predict_measured_runs
from repro.config import EmulatedNetwork, Layout
from repro.config.errors import ConfigError
from repro.config.network import CORES_SHARE
from repro.config.system import System
from repro.config.systems import parse_system
from repro.emulate.compute_rate import COMPUTE_RATE_FACT
from repro.launch import simulated
from repro.results.metrics import STEP_SECONDS
from repro.results.record_parts import NetworkReport, RankOnNetwork
from repro.results.store import read_records
from repro.simulate.time.emulated import MESSAGE_CORES_FACT, emulated_system
from repro.simulate.time.network import Network
from tests.accuracy.twins.conftest import tables, written_suite
from tests.records import latest, made_up
from tests.training import tiny

ONE_NODE = EmulatedNetwork(nodes=1, ranks_per_node=16, within=2e7)


@pytest.mark.parametrize(
    ("nodes", "layout", "op", "messages"),
    [
        (1, Layout(dp=16, zero=3), "all_gather", 30),
        (4, Layout(dp=16, zero=3), "all_gather", 1),  # a ring of the nodes, in gloo
        (4, Layout(dp=4, tp=4, zero=1), "reduce_scatter", 6),  # one rank of each node
        (1, Layout(dp=16, zero=3), "all_reduce", 1),
        (1, Layout(tp=16), "all_gather", 1),  # no data parallelism
    ],
)
def test_predicted_messages_equal_those_of_the_transport(
    machine: System, nodes: int, layout: Layout, op: str, messages: int
) -> None:
    between = 8e6 if nodes > 1 else 0.0
    network = EmulatedNetwork(nodes=nodes, ranks_per_node=16 // nodes, between=between, within=20e6)
    assert Network(emulated_system(machine, network), layout).messages(op, "dp") == messages


@pytest.mark.slow
def test_simulated_records_have_the_seconds_of_the_twin(machine: System, lowbw: Twin, tmp_path: Path) -> None:
    here = tmp_path / "here.toml"
    here.write_text(document.toml_text(tables()))
    suite = written_suite(tmp_path / "windtunnel_x.toml", NamedTwin(lowbw))
    results = tmp_path / "results"
    list(simulated.simulate_suites([(suite, list(suite.entries))], results, str(here), rerun=False))
    found = {line["name"]: line["metrics"][STEP_SECONDS] for line in latest(results, "simulated").values()}
    assert found == {f"{m.original.name}@here": pytest.approx(m.after.step_s) for m in lowbw.members}
    assert all(record.experiment.network is not None for record in read_records(results))  # type: ignore[union-attr]


def machine_with_facts(**facts: float) -> System:
    """Return the machine with additional facts in its calibration file."""
    found = tables()
    found["provenance"]["facts"] |= facts
    return parse_system(found, name="here", file="here.toml")


def test_predicted_links_scale_with_the_compute_rate() -> None:
    """Link rates of a suite hold for its compute rate. Runs and predictions scale the link rates."""
    here = machine_with_facts(**{COMPUTE_RATE_FACT: 10e9})
    written = EmulatedNetwork(nodes=4, ranks_per_node=4, between=8e6, within=2e7, flops_per_s=5e9)
    as_run = EmulatedNetwork(nodes=4, ranks_per_node=4, between=16e6, within=4e7)
    assert emulated_system(here, written).links == emulated_system(here, as_run).links


def test_rank_computes_with_its_share_of_a_core() -> None:
    found = emulated_system(machine_with_facts(), ONE_NODE)
    for name, rate in machine_with_facts().device.operators.items():
        assert found.device.operators[name] == rate.slowed(1 / CORES_SHARE)


def test_unsuitable_calibration_is_refused() -> None:
    """Scaled links need a measured compute rate, messages need cores and the ring of all ranks."""
    old = tables()
    del old["links"]["memory"]["collectives"]
    here, scaled = machine_with_facts(), replace(ONE_NODE, flops_per_s=5e9)
    few_cores = "half of the cores on which ranks compute: repro calibrate --suite"
    for system, network, message in (
        (here, scaled, f"{COMPUTE_RATE_FACT}.*run repro calibrate again"),
        (machine_with_facts(**{MESSAGE_CORES_FACT: 0}), ONE_NODE, few_cores),
        (here, EmulatedNetwork(nodes=2, ranks_per_node=4, between=1e7), "--gpus 8"),
        (parse_system(old, name="old", file="old.toml"), ONE_NODE, "run repro calibrate again"),
    ):
        with pytest.raises(ConfigError, match=message):
            emulated_system(system, network)


def test_prediction_of_a_run_uses_its_recorded_links() -> None:
    """A run scales its links to its own compute rate, which can differ from that of the calibration file."""
    here = machine_with_facts(**{COMPUTE_RATE_FACT: 5e9})
    network = EmulatedNetwork(nodes=4, ranks_per_node=4, between=8e6, within=2e7, flops_per_s=5e9)

    def predicted(times: float, **changed: float) -> float:
        rates = {"rank sends": [times * 2e7] * 16, "node sends": [times * 8e6] * 4}
        facts: dict[str, Any] = {"mtu": 1500, "payload_share": 0.95, "rates": rates}
        facts |= {"round_trip_s": {}, "user_namespace": False}
        sizes = {"sent_bytes": 0, "received_bytes": 0}
        rank = RankOnNetwork(compute_flops_per_s=5e9, core_share=0.05, facts=facts, **sizes)
        on_network = replace(tiny(Layout(dp=16)), network=replace(network, **changed))
        record = made_up("a", experiment=on_network.as_dict(), metrics={STEP_SECONDS: 1.0})
        found = predict_measured_runs([replace(record, network=NetworkReport.from_ranks([rank]))], here)
        assert not found.missing
        return found.pairs[0].predicted

    assert predicted(0.5) > 1.2 * predicted(1.0)
    assert predicted(0.5) == predicted(0.5, flops_per_s=50e9, between=1e6), "requested rates have no effect"
