"""Tests of the seconds of collectives and messages: published measurements, pods, and properties of random systems."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError, Layout
from repro.config.links import Collective
from repro.config.quantity import Quantity
from repro.config.system import Link, System
from repro.config.systems import load_system_file
from repro.config.timing import Provenance
from repro.measure.local_system import discover
from repro.parallel.ledger import RING_PASSES
from repro.simulate.placement import group_members
from repro.simulate.time.interconnect import Ring
from repro.simulate.time.network import Network
from tests.simulate.time.networks import groups, network, networks, number, ops, payloads, with_link

GB = 1e9
LARGE = 8 << 30
NODE_BANDWIDTH = 400e9 * 0.96
"""Bytes/s of a DGX H100's eight adapters."""
HALF_ADAPTERS = with_link("dgx-a100-40gb", "inter-node", bandwidth=100e9, adapters=4)


def bus_bandwidth(found: Network, payload: int, group: str = "world") -> float:
    """Return the bus bandwidth of an all-reduce as nccl-tests print it."""
    n = len(found.placement.ranks_of(group, 0))
    return 2 * (n - 1) / n * payload / found.seconds("all_reduce", group, payload)


# --- published measurements, none of which is an input of a system file


@pytest.mark.parametrize(
    ("system", "ranks", "payload", "measured", "within", "source"),
    [
        ("selene", 8, 4 << 30, 232.54, 0.05, "one node of 8 A100, NVIDIA/nccl#1048"),
        ("selene", 64, LARGE, 192, 0.03, "DGX A100 with 8 x 200 Gb/s, NVIDIA/nccl#812"),
        ("selene", 32, 4 << 20, 35.5, 0.15, "4 DGX A100, NVIDIA/deepops slurm-cluster/slurm-perf-cluster.md"),
        ("selene", 32, 16 << 20, 85.3, 0.1, "the same"),
        ("selene", 32, 32 << 20, 110.9, 0.1, "the same"),
        ("selene", 32, 64 << 20, 120.4, 0.12, "the same"),
        ("selene", 32, 1 << 30, 178.7, 0.05, "the same"),
        ("dgx-a100-40gb", 8, 4 << 20, 65.5, 0.05, "8 A100 40 GB, tests of microsoft/superbenchmark"),
        ("dgx-a100-40gb", 8, 32 << 20, 156.9, 0.15, "8 A100 40 GB, tests of microsoft/superbenchmark"),
        ("selene", 2, 16 << 20, 128.4, 0.2, "AR_GPU2 of a node of 8 A100, VIA-Research/vTrain trace/a100"),
        ("selene", 2, 64 << 20, 165.9, 0.25, "the same"),
        ("selene", 4, 16 << 20, 140.8, 0.15, "AR_GPU4"),
        ("selene", 4, 64 << 20, 186.0, 0.15, "the same"),
        ("selene", 8, 16 << 20, 126.6, 0.15, "AR_GPU8"),
        ("selene", 8, 128 << 20, 201.9, 0.1, "the same"),
        ("dgx2", 12, 1 << 30, 123.1, 0.05, "12 V100 of a DGX-2, a public log of nccl-tests"),
        ("dgx1-v100-16gb", 64, LARGE, 47, 0.04, "DGX-1, 'I always get 47 GB/s', NVIDIA/nccl#307"),
        ("dgx-h100", 8, 4 << 30, 367.5, 0.03, "8 H100, ring, 365 to 370, NVIDIA/nccl#1455"),
        (
            HALF_ADAPTERS,
            24,
            LARGE,
            96,
            0.02,
            "24 A100, 4 x 200 Gb/s a node: 95.7 to 96.7, NVIDIA/nccl-tests#119",
        ),
        (HALF_ADAPTERS, 24, 133_169_160, 96, 0.1, "the same; modelled latency is too high"),
    ],
)
def test_bus_bandwidth_equals_measurements_of_nccl_tests(
    system: str | System, ranks: int, payload: int, measured: float, within: float, source: str
) -> None:
    found = bus_bandwidth(network(system, dp=ranks), payload) / GB
    assert found == pytest.approx(measured, rel=within), source


# --- adapters


def test_groups_of_a_dgx_2_share_eight_adapters() -> None:
    """Model parallelism of degree 16 puts 16 data-parallel groups on the 8 adapters; each gets half an adapter.

    A single data-parallel group (degree 1) uses as many adapters as it has rings.
    """
    few, many = (with_link("dgx2", "inter-node", rings=rings) for rings in (2, 8))
    for system, degrees, share in (
        ("dgx2", {"tp": 16, "dp": 25}, 16),
        ("dgx2", {"dp": 64}, 8),
        (few, {"dp": 64}, 8 / 2),
        (few, {"tp": 16, "dp": 4}, 16),
        (many, {"tp": 4, "dp": 16}, 4),
        (many, {"dp": 64}, 1),
    ):
        assert network(system, **degrees).bus_bandwidth("dp") == pytest.approx(100e9 * 0.96 / share)


def test_groups_behind_one_switch_use_the_same_adapter() -> None:
    """NCCL before 2.9.6 on DGX A100: the ring of a group with a part of a node has half of its share of adapters.
    A group with all ranks of a node, and messages between stages, use all adapters."""
    recent, peak = "selene", 200e9 * 0.96
    old = with_link(recent, "inter-node", switch=2)
    for tp, share in ((8, 8), (4, 4), (2, 2)):
        layout = {"tp": tp, "dp": 128 // tp}
        assert network(recent, **layout).bus_bandwidth("dp") == pytest.approx(peak / share)
        assert network(old, **layout).bus_bandwidth("dp") == pytest.approx(peak / share / 2)
    assert network(old, dp=64).bus_bandwidth("dp") == pytest.approx(peak)
    stages = {"tp": 8, "pp": 2}
    sent = network(old, **stages).send_seconds(10**9, from_stage=0, to_stage=1)
    assert sent == network(recent, **stages).send_seconds(10**9, from_stage=0, to_stage=1)


def test_a_single_sender_of_a_node_uses_one_adapter() -> None:
    """Two of the 16 senders of a stage share each of the 8 adapters; a single sender has its adapter alone."""
    found = network("dgx2", tp=16, pp=2)
    full = found.send_seconds(10**9, from_stage=0, to_stage=1)
    assert full == pytest.approx(10**9 / (6.25e9 * 0.96), rel=1e-3)
    # With 16 stages in a node, one rank sends to the next node and does not share its adapter.
    alone = network("dgx2", pp=32)
    assert alone.send_seconds(10**9, from_stage=15, to_stage=16) == pytest.approx(10**9 / 12e9, rel=1e-3)
    assert alone.send_seconds(10**9, from_stage=0, to_stage=1) == pytest.approx(10**9 / 120e9, rel=1e-2)


def test_devices_of_a_mesh_use_only_links_among_themselves() -> None:
    """Any two of four V100s have two of six links: three devices reach two thirds, and a message one third."""
    reach = 150e9 * 0.827
    for system, tp, rate in (
        *(("jean-zay", 2, 0.333 * reach), ("jean-zay", 3, 0.666 * reach), ("jean-zay", 4, 0.999 * reach)),
        # Eight devices have one of six links between most pairs.
        *(("oneflow-v100", 2, 0.167 * 120e9), ("oneflow-v100", 4, 0.501 * 120e9), ("oneflow-v100", 8, 120e9)),
        *(("dgx2", 2, 120e9), ("dgx2", 8, 120e9), ("dgx2", 16, 120e9)),  # a switch
    ):
        assert network(system, tp=tp).bus_bandwidth("tp") == pytest.approx(rate)
    stages = network("jean-zay", pp=4)
    payload = 1 << 30
    latency = stages.number("nvlink", "latency_s")
    assert stages.send_seconds(payload, from_stage=0, to_stage=1) - latency == pytest.approx(
        payload / (0.333 * reach)
    )


def test_groups_behind_one_host_bridge_are_not_slowed() -> None:
    """SimuMax measured 0.69 of 30 GB/s in rings of two and of four, and 0.45 in rings of eight."""
    for tp, dp, share in ((2, 4, 0.69), (4, 2, 0.69), (8, 1, 0.45)):
        found = network("a100-pcie", tp=tp, dp=dp).bus_bandwidth("tp")
        assert found == pytest.approx(share * 30e9, rel=0.01)
    for tp, dp in ((4, 2), (2, 4)):  # every second or fourth device: rings cross the bridges
        found = network("a100-pcie", tp=tp, dp=dp).bus_bandwidth("dp")
        assert found == pytest.approx(0.45 * 30e9 / tp, rel=0.01)


# --- laws


@given(networks(), ops, groups, payloads, payloads)
def test_seconds_follow_payload_and_peak(
    drawn: tuple[System, Layout], op: str, group: str, one: int, other: int
) -> None:
    """Every rank sends passes x (n - 1) / n of the payload, at most at the peak rate of its links.

    A larger payload takes no less time. An all-reduce takes no more than its two halves.
    """
    system, layout = drawn
    found, (less, more) = Network(system, layout), sorted((one, other))
    n, seconds = max(1, group_members(found.layout, group).shape[1]), found.seconds(op, group, more)
    assert 0 <= found.seconds(op, group, less) <= seconds
    halves = found.seconds("reduce_scatter", group, more) + found.seconds("all_gather", group, more)
    assert found.seconds("all_reduce", group, more) <= halves * (1 + 1e-9)
    if n == 1:
        assert seconds == 0
        return
    link = system.links[found.link(group)]
    peak = link.bandwidth.value
    if link.per == "device" and found.link(group) == "inter-node":
        peak *= system.devices_per_node.value
    assert seconds >= RING_PASSES[op] * more * (n - 1) / n / peak * (1 - 1e-9)


# --- measured points


def calibrated(points: tuple[tuple[float, float], ...], ranks: int = 4, op: str = "all_reduce") -> System:
    unknown, collectives = Quantity(value=None, source="a test"), {op: Collective(points=points)}
    link = Link(per="node", bandwidth=unknown, collectives=collectives, overlap_cost=number(0.25))
    provenance = Provenance(date="2026-01-01", torch="2.6", ranks=ranks, repeats=3)
    return replace(discover(), links={"memory": link}, provenance=provenance)


def test_measured_points_replace_the_formula() -> None:
    system = calibrated(((1000, 1e-4), (1_000_000, 1e-2)))
    found = network(system, dp=4)
    seconds = [found.seconds("all_reduce", "dp", payload) for payload in (1, 1000, 500_500, 3_000_000)]
    assert seconds == pytest.approx([1e-4, 1e-4, 5.05e-3, 3e-2])
    assert found.seconds("all_reduce", "tp", 1000) == 0
    assert found.overlap_cost == 0.25
    message = r"links.memory.bandwidth = 'unknown': this command needs a known value"
    with pytest.raises(ConfigError, match=message):
        found.seconds("all_gather", "dp", 1000)
    # A faster larger message gets the seconds of the smaller one.
    stages = network(calibrated(((1000, 1e-4), (2000, 2e-4), (3000, 1e-4)), op="send"), pp=4)
    cases = ((1500, 0, 1), (1500, 3, 0), (1500, 1, 1), (2500, 0, 1))
    sent = [stages.send_seconds(size, from_stage=one, to_stage=other) for size, one, other in cases]
    assert sent == pytest.approx([1.5e-4, 1.5e-4, 0, 2e-4])


def test_overlap_cost_is_that_of_the_data_parallel_link() -> None:
    both = with_link(with_link("dgx2", "nvlink", overlap_cost=0.1), "inter-node", overlap_cost=0.3)
    assert network(both, dp=2).overlap_cost == 0.1
    assert network(both, dp=32).overlap_cost == 0.3
    assert network(both, tp=2).overlap_cost == 0.3
    assert network(replace(both, links={})).overlap_cost == 0, "one device sends no messages"


def flat(seconds: float) -> tuple[tuple[float, float], ...]:
    """Return points of a collective that takes `seconds` whatever its payload is."""
    return ((1000.0, seconds), (1e6, seconds))


def with_collective(system: System, link: str, collective: Collective) -> System:
    """Return `system` with the measured `all_reduce` on `link`."""
    changed = replace(system.links["memory"], collectives={"all_reduce": collective})
    return replace(system, links=system.links | {link: changed})


def test_the_most_similar_measured_group_counts() -> None:
    """A group of equal size and stride counts first. Other sizes are scaled from the nearest measured size."""
    smaller = (
        Collective(points=flat(1e-3), ranks=2),
        Collective(points=flat(2e-3), ranks=2, stride=4),
        Collective(points=flat(4e-3), ranks=4, stride=2),
    )
    measured = Collective(points=flat(8e-3), groups=smaller)
    system = with_collective(calibrated(flat(1), ranks=8), "memory", measured)
    for tp, dp, group, seconds in (
        (2, 4, "tp", 1e-3),
        (2, 4, "dp", 4e-3),
        (2, 4, "world", 8e-3),
        (4, 2, "dp", 2e-3),
        (3, 1, "tp", 4e-3 * 2 / 3),
    ):
        found = network(system, tp=tp, dp=dp).seconds("all_reduce", group, 5000)
        assert found == pytest.approx(seconds), (tp, dp, group)


def test_link_class_and_members_per_node_select_the_measurement() -> None:
    """Two nodes have two processes each. The link class and the members per node select the measurement."""
    system = replace(calibrated(flat(1)), devices_per_node=number(2))
    alone = Collective(points=flat(4e-3), ranks=2, per_node=1, stride=2)
    across = Collective(points=flat(8e-3), per_node=2, groups=(alone,))
    system = with_collective(system, "inter-node", across)
    system = with_collective(system, "memory", Collective(points=flat(1e-3), ranks=2))
    found = network(system, tp=2, dp=2)
    assert (found.link("tp"), found.link("dp")) == ("memory", "inter-node")
    assert found.seconds("all_reduce", "tp", 5000) == pytest.approx(1e-3)
    assert found.seconds("all_reduce", "dp", 5000) == pytest.approx(4e-3)
    assert network(system, dp=4).seconds("all_reduce", "dp", 5000) == pytest.approx(8e-3)


@pytest.mark.parametrize(("cores_s", "expected"), [(5e-3, 3 * 5e-3), (1e-3, 3 * 1.001e-3)])
def test_a_ring_step_takes_the_longer_of_its_message_and_its_copies(cores_s: float, expected: float) -> None:
    """Each of the three steps sends 1 MB at 1 GB/s with 1 us latency."""
    ring = Ring(ranks=4, nodes=1, rate=1e9, start=0, inside=1e-6, between=0, half=0, chunk=0)
    found = ring.seconds("all_gather", 4_000_000, cores_s=lambda _: cores_s)
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_lower_bound_of_all_gathers_has_the_latency_of_each() -> None:
    found = network("dgx2", dp=64)
    empty, full = (found.seconds("all_gather", "dp", payload) for payload in (0, LARGE))
    assert 0 < empty < full
    assert found.least_seconds("all_gather", "dp", LARGE, 4) == pytest.approx(3 * empty + full)


def test_a_missing_inter_node_link_is_an_error() -> None:
    selene = load_system_file("selene")
    alone = replace(selene, links={"nvlink": selene.links["nvlink"]})
    message = "links = 'inter-node': must be a link class of this system: nvlink"
    with pytest.raises(ConfigError, match=message):
        network(alone, dp=16).seconds("all_reduce", "dp", 1000)


def test_network_and_allocator_models_need_no_torch() -> None:
    code = "import sys, repro.simulate.memory.allocator, repro.simulate.time.network; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- oversubscription between pods of nodes


def oversubscribed(pod: int, oversubscription: float, system: str | System = "dgx-h100") -> System:
    return with_link(system, "inter-node", pod=pod, oversubscription=oversubscription)


def test_few_rings_are_not_slowed_by_oversubscription() -> None:
    """A pod of 8 nodes has eight rings, one per adapter, which together need the bandwidth of one node."""
    plain = network("dgx-h100", tp=8, dp=16).bus_bandwidth("dp")
    assert plain == pytest.approx(NODE_BANDWIDTH / 8)
    for factor, share in ((7, 1), (8, 1), (16, 2), (32, 4)):
        found = network(oversubscribed(8, factor), tp=8, dp=16).bus_bandwidth("dp")
        assert found == pytest.approx(plain / share)


def test_stage_messages_between_pods_share_the_uplink() -> None:
    """Stages and pods have 8 nodes each, so the full traffic between two of the 4 stages leaves its pod."""
    stages = {"tp": 8, "dp": 8, "pp": 4}
    plain, tapered = network("dgx-h100", **stages), network(oversubscribed(8, 7), **stages)
    latency = plain.number("inter-node", "latency_s")
    seconds = [each.send_seconds(10**9, from_stage=0, to_stage=1) - latency for each in (plain, tapered)]
    assert seconds[1] == pytest.approx(7 * seconds[0])
    assert tapered.seconds("all_reduce", "dp", 10**9) == plain.seconds("all_reduce", "dp", 10**9)
    # A pod of 16 nodes contains stages 0 and 1, so their messages stay inside.
    larger = network(oversubscribed(16, 7), **stages)
    assert larger.send_seconds(10**9, from_stage=0, to_stage=1) - latency == pytest.approx(seconds[0])
    # From stage 1 to stage 2, eight nodes share an uplink with the bandwidth of 16 / 7 nodes.
    crossing = larger.send_seconds(10**9, from_stage=1, to_stage=2) - latency
    assert crossing == pytest.approx(seconds[0] * 8 / (16 / 7))


def test_uplink_and_downlink_are_counted_separately() -> None:
    """Each of two stages is a pod, and both directions have the same bandwidth."""
    found = network(oversubscribed(1, 4), tp=8, pp=2)
    latency = found.number("inter-node", "latency_s")
    up, down = (found.send_seconds(10**9, from_stage=one, to_stage=1 - one) - latency for one in (0, 1))
    assert up == down == pytest.approx(10**9 / (NODE_BANDWIDTH / 8 / 4))


factors = st.floats(1, 50)
several_nodes = networks().filter(lambda drawn: "inter-node" in drawn[0].links)


@given(several_nodes, ops, groups, payloads, factors, factors, st.integers(1, 64))
def test_only_traffic_between_pods_is_slowed_by_oversubscription(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, one: float, other: float, pod: int
) -> None:
    """More oversubscription is never faster, a group inside one pod is not slowed, and an oversubscription of 1 changes
    no bit. An oversubscription of 1 + 1e-9 changes little."""
    system, layout = drawn
    less, more, flat, pods, nearly, inside = (
        Network(each, layout)
        for each in (
            *(with_link(system, "inter-node", oversubscription=factor) for factor in sorted((one, other))),
            *(oversubscribed(size, 1, system) for size in (1, pod)),
            oversubscribed(pod, 1 + 1e-9, system),
            oversubscribed(layout.world, one, system),  # as many nodes as ranks: one pod contains all
        )
    )
    assert less.seconds(op, group, payload) <= more.seconds(op, group, payload)
    plain_s = flat.seconds(op, group, payload)
    assert pods.seconds(op, group, payload) == inside.seconds(op, group, payload) == plain_s
    assert nearly.bus_bandwidth(group) == pytest.approx(flat.bus_bandwidth(group), rel=1e-8)
    if layout.pp > 1:
        sent = [
            each.send_seconds(payload, from_stage=0, to_stage=1) for each in (less, more, flat, pods, nearly)
        ]
        assert sent[0] <= sent[1]
        assert sent[2] == sent[3]
        assert sent[4] == pytest.approx(sent[2], rel=1e-8)


@pytest.mark.parametrize(("key", "value"), [("oversubscription", 0.5), ("pod", 1.5), ("pod", 0)])
def test_invalid_pods_and_oversubscription_are_errors(key: str, value: float) -> None:
    link = load_system_file("dgx-h100").links["inter-node"]
    with pytest.raises(ConfigError, match=key):
        replace(link, **{key: number(value)})
