"""Tests of twins of published comparisons: similarity numbers and predicted ratios equal the originals'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from repro.accuracy.calibrate.document import toml_text as toml
from repro.accuracy.twins.derive import Twin, inside_rate, useful_rate
from repro.accuracy.twins.numbers import SimilarityNumber, ratio_of, similarity_numbers
from repro.accuracy.twins.suite import NamedTwin, claim_comparisons, named_comparisons
from repro.claims.run_commands import SuiteCatalogue
from repro.cli import main
from repro.config import EmulatedNetwork
from repro.config.errors import ConfigError
from repro.config.experiment import TWIN_RATIO
from repro.config.system import System
from repro.emulate.network import payload_share
from repro.simulate.time.calibration import CALIBRATED, PUBLISHED_POINT
from repro.simulate.time.emulated import emulated_system
from repro.simulate.time.network import Network
from tests import committed
from tests.accuracy.twins.conftest import LOWBW, TwinOf, tables, written_suite


def by_name(found: list[SimilarityNumber]) -> dict[str, SimilarityNumber]:
    return {number.name.partition(",")[0]: number for number in found}


def test_members_of_the_3p75x_pair_run_together(lowbw: Twin, twin_of: TwinOf) -> None:
    """Members of one model also have one twin model."""
    assert lowbw.together == lowbw.members
    assert [m.original.name for m in lowbw.members] == ["lowbw-megatron", "lowbw-deepspeed"]
    for member in lowbw.members:
        assert member.network.world == member.twin.layout.world == 16
        assert member.twin.layout.replica_batch == member.original.layout.replica_batch
    twin = twin_of("slow_links/slow-tp4-dp4", part=4)
    assert len({member.twin.model for member in twin.members}) == 1
    assert twin.members[0].twin.model.heads == 16, "tp over all ranks divides the heads"


def test_twin_preserves_the_similarity_numbers(lowbw: Twin) -> None:
    """Compute ratios deviate only by a member's useful rate relative to the common rate."""
    rates = [useful_rate(m.after) / useful_rate(m.before) / lowbw.scales[0].rate for m in lowbw.members]
    for member, ratio in zip(lowbw.members, rates, strict=True):
        found = by_name(similarity_numbers(member, lowbw.members[0]))
        assert found["compute / data-parallel communication"].change == pytest.approx(1 / ratio - 1, abs=2e-3)
        assert found["attention / other products"].kept
        assert found["vocabulary / layers"].kept
        assert found["bucket / gradients"].change == pytest.approx(0, abs=0.02)
        assert found["replica batch"].change == 0
    found = by_name(similarity_numbers(lowbw.members[0], lowbw.members[0]))
    change = found["compute / tensor-parallel communication"].change
    assert change == pytest.approx(1 / rates[0] - 1, abs=2e-3)
    # With the original's latency, depth, rates and optimizer, the twin has the original's ratio.
    ratio = ratio_of(lowbw.members[1], lowbw.members[0], lowbw.scales[0])
    assert ratio.rest == pytest.approx(ratio.original, rel=0.01)
    assert all(abs(effect.ratio / ratio.twin - 1) > 1e-3 for effect in ratio.effects)


def test_overlapped_communication_is_not_compute(twin_of: TwinOf) -> None:
    """Otherwise, links would be scaled to the rate of cores that also carry messages."""
    twin = twin_of("slow_links/slow-zero1", width=400)
    first = twin.members[0]
    assert first.after.slowest.busy["overlap"] > 0
    rate = useful_rate(first.after) / useful_rate(first.before)
    assert rate == pytest.approx(twin.scales[0].rate, rel=0.02)


def test_10_times_faster_ranks_need_10_times_faster_links(
    machine: System, lowbw: Twin, twin_of: TwinOf
) -> None:
    rates = {name: rate.slowed(1 / 10) for name, rate in machine.device.operators.items()}
    link = machine.links["memory"]
    link = replace(link, bandwidth=replace(link.bandwidth, value=3e9))
    fast = replace(machine, device=replace(machine.device, operators=rates), links={"memory": link})
    other, slow = twin_of(LOWBW, on=fast, width=400).members[0].network, lowbw.members[0].network
    assert other.between == pytest.approx(10 * slow.between, rel=0.02)
    assert other.within == pytest.approx(10 * slow.within, rel=0.02)


def test_group_on_one_of_several_adapters_has_another_network(dgx2_4b: Twin) -> None:
    """4B on DGX-2: four groups of Megatron use four adapters of a node, the one group of DeepSpeed uses one."""
    assert len(dgx2_4b.together) == 1
    for member in dgx2_4b.members:
        found = by_name(similarity_numbers(member, dgx2_4b.members[0]))
        assert found["compute / data-parallel communication"].original > 0
        assert abs(found["dp hops"].change) < 0.25
    megatron, deepspeed = (member.network.between for member in dgx2_4b.members)
    assert megatron > 3 * deepspeed
    assert dgx2_4b.members[0].network.within == 0
    assert "times the bytes/s" in dgx2_4b.unlimited[0]


def test_members_with_the_baseline_network_run_together(twin_of: TwinOf) -> None:
    """All-reduces of every layer over the slow link need the link rate of gradients. Messages between stages with one
    layer instead of twelve need faster links."""
    twin = twin_of("slow_links/slow-tp4-dp4", width=400)
    together = [member.original.name for member in twin.together]
    assert together == ["slow-tp4-dp4", "slow-tp16", "slow-zero3-batch4"]
    stages = twin.members[1]
    assert stages.network.between == pytest.approx(12 * twin.members[0].network.between, rel=0.02)
    share = by_name(similarity_numbers(stages, twin.members[0]))["pipeline communication / compute"]
    assert share.twin < 10 * share.original


def test_link_rate_of_the_original_can_be_an_option(lowbw: Twin, twin_of: TwinOf) -> None:
    half, fast = (twin_of(LOWBW, width=400, between=rate) for rate in (2.4e9, 19.2e9))
    network, slower, faster = (twin.members[0].network for twin in (lowbw, half, fast))
    assert slower.between == pytest.approx(network.between / 2, rel=0.02)
    assert slower.within == pytest.approx(network.within, rel=0.02)
    assert fast.together == fast.members, "links inside the nodes limit all rings to one rate"
    assert faster.between == pytest.approx(4 * network.between, rel=0.02)
    assert inside_rate(half.members[0].system) == pytest.approx(15.75e9 * 0.381)


def test_names_and_claims_select_the_compared_experiments(catalogue: SuiteCatalogue) -> None:
    """A baseline selects its subjects. Other names are compared with each other. A claim selects its comparison."""
    comparisons = named_comparisons([LOWBW, "deepspeed_64gpu/64gpu-4b-megatron"], catalogue.suites)
    assert [[e.name for e in members] for members in comparisons] == [
        ["lowbw-megatron", "lowbw-deepspeed"],
        ["64gpu-4b-megatron", "64gpu-4b-deepspeed"],
    ]
    names = ["25b-one-dgx2", "40b-two-dgx2"]
    (two,) = named_comparisons([f"zero_throughput/{name}" for name in names], catalogue.suites)
    assert [e.name for e in two] == names
    claim = committed.ledger().claim
    assert claim_comparisons(claim("ds-3p75x-lowbw"), catalogue.suites) == comparisons[:1]
    with pytest.raises(ConfigError, match=r"\[\[compare\]\] table"):
        claim_comparisons(claim("zero-bw-cliff"), catalogue.suites)
    with pytest.raises(ConfigError, match="on a system with a file, since a twin"):
        named_comparisons(["smoke/states-z0-dp2", "smoke/states-z1-dp2"], catalogue.suites)


def test_emulated_bandwidth_is_the_rate_of_token_buckets(machine: System, lowbw: Twin) -> None:
    network = EmulatedNetwork(nodes=4, ranks_per_node=4, between=8e6, within=20e6)
    system = emulated_system(machine, network)
    layouts = [member.twin.layout for member in lowbw.members]
    rates = [Network(system, layout).bus_bandwidth("dp") / payload_share(network) for layout in layouts]
    assert rates == [pytest.approx(2e6), pytest.approx(8e6)], "a node's link has four groups, or one"
    assert Network(system, layouts[0]).bus_bandwidth("tp") == pytest.approx(20e6 * payload_share(network))


def test_ring_step_takes_link_time_or_cpu_time(machine: System, lowbw: Twin) -> None:
    """Sixteen messages share the cores. On a slow link, the second of two segments adds half of the CPU time."""
    network = EmulatedNetwork(nodes=4, ranks_per_node=4, between=8e6, within=20e6)
    system, layout = emulated_system(machine, network), lowbw.members[0].twin.layout
    over_nodes = Network(system, layout)
    small, large = (over_nodes.seconds("all_reduce", "dp", size) for size in (8, 40_000_000))
    assert small == pytest.approx(6 * 2e-3, rel=1e-2), "gloo has only rings: six messages, no tree"
    assert large == pytest.approx(6 * (10e6 / (2e6 * payload_share(network)) + 2e-3 / 2), rel=1e-6)
    fast = Network(emulated_system(machine, EmulatedNetwork(nodes=1, ranks_per_node=16)), layout)
    assert fast.seconds("all_reduce", "tp", 1_000_000) == pytest.approx(6 * 2.5e-3, rel=1e-2)


def test_written_suite_equals_the_twin(lowbw: Twin, dgx2_4b: Twin, tmp_path: Path) -> None:
    suite = written_suite(tmp_path / "windtunnel_x.toml", NamedTwin(lowbw), NamedTwin(dgx2_4b, "-x"))
    members = [*lowbw.members, *dgx2_4b.members]
    for entry, member in zip(suite.entries, members, strict=True):
        e = entry.experiment
        assert replace(e, name=member.twin.name).key == member.twin.key
        baseline = (lowbw if member in lowbw.members else dgx2_4b).members[0]
        message = {n.name: (n.original, n.twin) for n in similarity_numbers(member, baseline)}
        assert e.twin is not None
        assert e.twin.original == member.original.name
        assert e.twin.part == pytest.approx(member.twin.model.hidden / member.original.model.hidden, rel=1e-3)
        assert e.twin.numbers == {name: pytest.approx(pair, rel=1e-3) for name, pair in message.items()}
    first, second = (suite.entry(name).experiment.twin for name in ("lowbw-megatron", "lowbw-deepspeed"))
    assert first is not None
    assert second is not None
    assert first.between == pytest.approx(0.96 * 5e9), "40 Gbit/s Ethernet minus the overhead of frames"
    assert TWIN_RATIO in second.numbers
    assert TWIN_RATIO not in first.numbers
    assert [row.subjects for row in suite.comparisons] == [("lowbw-deepspeed",)]


@pytest.mark.slow
def test_output_states_the_calibration_of_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The original's V100 has a published calibration point. The twin's machine is calibrated."""
    (tmp_path / "here.toml").write_text(toml(tables()))
    arguments = ["twin", "ds-3p75x-lowbw", "--machine", str(tmp_path / "here.toml")]
    assert main([*arguments, "--details"]) == 0
    assert f"Basis of predicted times: {PUBLISHED_POINT}, {CALIBRATED}. " in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    members = [member for each in json.loads(capsys.readouterr().out) for member in each["members"]]
    assert [member["rests_on"] for member in members] == [
        {"original": PUBLISHED_POINT, "twin": CALIBRATED} for _ in members
    ]
