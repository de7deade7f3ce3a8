"""Predictions of runs on emulated networks: as records of a store, and beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.accuracy.calibrate import document
from repro.accuracy.twins.derive import Twin
from repro.accuracy.twins.suite import NamedTwin, suite_text
from repro.accuracy.validate.machine import predict_measured_runs
from repro.config import EmulatedNetwork, Layout, suites
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
from tests.accuracy.twins.conftest import tables
from tests.records import latest, made_up
from tests.training import tiny


@pytest.mark.parametrize(
    ("nodes", "layout", "op", "messages"),
    [
        (1, Layout(dp=16, zero=3), "all_gather", 30),
        (4, Layout(dp=16, zero=3), "all_gather", 1),  # round a ring of the nodes, by gloo itself
        (4, Layout(dp=4, tp=4, zero=1), "reduce_scatter", 6),  # one rank of each node
        (1, Layout(dp=16, zero=3), "all_reduce", 1),
        (1, Layout(tp=16), "all_gather", 1),  # of data parallelism, of which there is none
    ],
)
def test_a_rank_begins_as_many_messages_as_its_transport(
    machine: System, nodes: int, layout: Layout, op: str, messages: int
) -> None:
    between = 8e6 if nodes > 1 else 0.0
    network = EmulatedNetwork(nodes=nodes, ranks_per_node=16 // nodes, between=between, within=20e6)
    assert Network(emulated_system(machine, network), layout).messages(op, "dp") == messages


@pytest.mark.slow
def test_the_records_of_a_twin_have_the_seconds_of_its_network(
    machine: System, lowbw: Twin, tmp_path: Path
) -> None:
    here, file = tmp_path / "here.toml", tmp_path / "windtunnel_x.toml"
    here.write_text(document.toml_text(tables()))
    file.write_text(
        suite_text([NamedTwin(lowbw)], file=str(file), name="windtunnel_x", arguments="", claims=())
    )
    suite = suites.load_suite(file)
    results = tmp_path / "results"
    list(simulated.simulate_suites([(suite, list(suite.entries))], results, str(here), rerun=False))
    found = {
        line["name"]: line["metrics"]["step_seconds.median"] for line in latest(results, "simulated").values()
    }
    assert found == {
        f"{member.original.name}@here": pytest.approx(member.after.step_s) for member in lowbw.members
    }
    assert all(record.experiment.network is not None for record in read_records(results))  # type: ignore[union-attr]


def calibrated(**facts: float) -> System:
    """The machine with what its file says of itself."""
    found = tables()
    found["provenance"]["facts"] |= facts
    return parse_system(found, name="here", file="here.toml")


def test_links_are_as_fast_as_a_run_here_would_make_them() -> None:
    """A suite's rates hold for ranks of one rate of compute: a run scales them, and so does what is expected of it."""
    here = calibrated(**{COMPUTE_RATE_FACT: 10e9})
    written = EmulatedNetwork(nodes=4, ranks_per_node=4, between=8e6, within=2e7, flops_per_s=5e9)
    as_run = EmulatedNetwork(nodes=4, ranks_per_node=4, between=16e6, within=4e7)
    assert emulated_system(here, written).links == emulated_system(here, as_run).links


def test_a_file_that_does_not_say_how_fast_ranks_compute_cannot_scale_links() -> None:
    network = EmulatedNetwork(nodes=1, ranks_per_node=16, within=2e7, flops_per_s=5e9)
    with pytest.raises(ConfigError, match=f"{COMPUTE_RATE_FACT}.*run repro calibrate again"):
        emulated_system(calibrated(), network)


def test_a_rank_has_its_share_of_a_core() -> None:
    found = emulated_system(calibrated(), EmulatedNetwork(nodes=1, ranks_per_node=16, within=2e7))
    for name, rate in calibrated().device.operators.items():
        assert found.device.operators[name] == rate.slowed(1 / CORES_SHARE)


def test_a_file_of_ranks_on_all_cores_is_not_of_ranks_that_leave_half_of_them_to_messages() -> None:
    with pytest.raises(
        ConfigError, match="half of the cores on which ranks compute: repro calibrate --suite"
    ):
        emulated_system(
            calibrated(**{MESSAGE_CORES_FACT: 0}), EmulatedNetwork(nodes=1, ranks_per_node=16, within=2e7)
        )


def test_a_run_is_predicted_on_the_links_that_it_had() -> None:
    """They are made for the rate at which ranks compute just then, which is not that of the hour of the file."""
    here = calibrated(**{COMPUTE_RATE_FACT: 5e9})
    network = EmulatedNetwork(nodes=4, ranks_per_node=4, between=8e6, within=2e7, flops_per_s=5e9)

    def predicted(times: float, **changed: float) -> float:
        rates = {"rank sends": [times * 2e7] * 16, "node sends": [times * 8e6] * 4}
        facts = {
            "mtu": 1500,
            "payload_share": 0.95,
            "rates": rates,
            "round_trip_s": {},
            "user_namespace": False,
        }
        ranks = [
            RankOnNetwork(
                compute_flops_per_s=5e9, core_share=0.05, sent_bytes=0, received_bytes=0, facts=facts
            )
        ]
        experiment = tiny(Layout(dp=16))
        on = replace(experiment, network=replace(network, **changed))
        record = made_up("a", experiment=on.as_dict(), metrics={STEP_SECONDS: 1.0})
        found = predict_measured_runs([replace(record, network=NetworkReport.from_ranks(ranks))], here)
        assert not found.missing
        return found.pairs[0].predicted

    assert predicted(0.5) > 1.2 * predicted(1.0)
    assert predicted(0.5) == predicted(0.5, flops_per_s=50e9, between=1e6), "whatever was asked for"
