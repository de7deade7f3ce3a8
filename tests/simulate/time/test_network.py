"""Tests of the seconds of collectives: properties on random systems, and published measurements."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

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
from repro.simulate.placement import GROUPS, group_members
from repro.simulate.time.network import Network, interpolate
from tests.simulate.time.networks import networks, number, payloads, with_link

GB = 1e9
OPS = tuple(RING_PASSES)
LARGE = 8 << 30


def network(system: str | System, **layout: Any) -> Network:
    return Network(load_system_file(system) if isinstance(system, str) else system, Layout(**layout))


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
        (
            "selene",
            32,
            4 << 20,
            35.5,
            0.15,
            "4 DGX A100, NVIDIA/deepops docs/slurm-cluster/slurm-perf-cluster.md",
        ),
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
    ],
)
def test_bus_bandwidth_equals_measurements_of_nccl_tests(
    system: str, ranks: int, payload: int, measured: float, within: float, source: str
) -> None:
    found = bus_bandwidth(network(system, dp=ranks), payload) / GB
    assert found == pytest.approx(measured, rel=within), source


def test_half_the_adapters_have_the_measured_bus_bandwidth() -> None:
    """24 A100, 4 x 200 Gb/s a node, 133 MB: 95.7 to 96.7 GB/s (NVIDIA/nccl-tests#119). Modelled latency is too high."""
    system = with_link(load_system_file("dgx-a100-40gb"), "inter-node", bandwidth=100e9, adapters=4)
    assert bus_bandwidth(network(system, dp=24), 133_169_160) / GB == pytest.approx(96, rel=0.1)
    assert bus_bandwidth(network(system, dp=24), LARGE) / GB == pytest.approx(96, rel=0.02)


# --- adapters


def test_groups_of_a_dgx_2_share_eight_adapters() -> None:
    """Model parallelism of degree 16 puts 16 data-parallel groups on the 8 adapters; each gets half an adapter.

    A single data-parallel group (degree 1) uses as many adapters as it has rings.
    """
    peak = 100e9 * 0.96
    many = with_link(load_system_file("dgx2"), "inter-node", rings=8)
    assert network("dgx2", tp=16, dp=25).bus_bandwidth("dp") == pytest.approx(peak / 16)
    assert network(many, tp=4, dp=16).bus_bandwidth("dp") == pytest.approx(peak / 4)
    assert network(many, dp=64).bus_bandwidth("dp") == pytest.approx(peak)
    assert network("dgx2", dp=64).bus_bandwidth("dp") == pytest.approx(peak / 8)


def test_a_communicator_uses_at_most_one_adapter_per_ring() -> None:
    few = with_link(load_system_file("dgx2"), "inter-node", rings=2)
    assert network(few, dp=64).bus_bandwidth("dp") == pytest.approx(2 * 12.5e9 * 0.96)
    assert network(few, tp=16, dp=4).bus_bandwidth("dp") == pytest.approx(6.25e9 * 0.96)


def test_groups_behind_one_switch_use_the_same_adapter() -> None:
    """NCCL before 2.9.6 on DGX A100: the ring of a group with a part of a node has half of its share of adapters.
    A group with all ranks of a node, and messages between stages, use all adapters."""
    recent, peak = load_system_file("selene"), 200e9 * 0.96
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
    alone = network(with_link(load_system_file("dgx2"), "inter-node"), pp=32)
    assert alone.send_seconds(10**9, from_stage=15, to_stage=16) == pytest.approx(10**9 / 12e9, rel=1e-3)
    assert alone.send_seconds(10**9, from_stage=0, to_stage=1) == pytest.approx(10**9 / 120e9, rel=1e-2)


def test_devices_of_a_mesh_use_only_links_among_themselves() -> None:
    """Any two of four V100s have two of six links: three devices reach two thirds, and a message one third."""
    reach = 150e9 * 0.827
    for tp, share in ((2, 0.333), (3, 0.666), (4, 0.999)):
        assert network("jean-zay", tp=tp).bus_bandwidth("tp") == pytest.approx(share * reach)
    stages = network("jean-zay", pp=4)
    payload = 1 << 30
    latency = stages.number("nvlink", "latency_s")
    assert stages.send_seconds(payload, from_stage=0, to_stage=1) - latency == pytest.approx(
        payload / (0.333 * reach)
    )
    for tp, share in ((2, 1 / 6), (4, 1 / 2), (8, 1)):  # eight with one of six links between most pairs
        assert network("oneflow-v100", tp=tp).bus_bandwidth("tp") == pytest.approx(share * 120e9, rel=5e-3)
    for tp in (2, 8, 16):  # a switch
        assert network("dgx2", tp=tp).bus_bandwidth("tp") == pytest.approx(120e9)


def test_groups_of_one_node_share_its_host_bridges() -> None:
    pcie = network("lowbw-v100", dp=4).bus_bandwidth("dp")
    assert network("lowbw-v100", tp=2, dp=2).bus_bandwidth("dp") == pytest.approx(pcie / 2)


def test_groups_behind_one_host_bridge_are_not_slowed() -> None:
    """SimuMax measured 0.69 of 30 GB/s in rings of two and of four, and 0.45 in rings of eight."""
    for tp, dp, share in ((2, 4, 0.69), (4, 2, 0.69), (8, 1, 0.45)):
        found = network("a100-pcie", tp=tp, dp=dp).bus_bandwidth("tp")
        assert found == pytest.approx(share * 30e9, rel=0.01)
    for tp, dp in ((4, 2), (2, 4)):  # every second or fourth device: rings cross the bridges
        found = network("a100-pcie", tp=tp, dp=dp).bus_bandwidth("dp")
        assert found == pytest.approx(0.45 * 30e9 / tp, rel=0.01)


# --- laws


@given(networks(), st.sampled_from(OPS), st.sampled_from(GROUPS), payloads, payloads)
def test_a_larger_payload_takes_no_less_time(
    drawn: tuple[System, Layout], op: str, group: str, one: int, other: int
) -> None:
    found = Network(*drawn)
    less, more = sorted((one, other))
    assert 0 <= found.seconds(op, group, less) <= found.seconds(op, group, more)


@given(networks(), st.sampled_from(OPS), st.sampled_from(GROUPS), payloads)
def test_no_collective_exceeds_the_peak_of_its_links(
    drawn: tuple[System, Layout], op: str, group: str, payload: int
) -> None:
    """Every rank sends passes x (n - 1) / n of the payload, at most at the peak rate of its links."""
    system, layout = drawn
    found = Network(system, layout)
    n = max(1, group_members(found.layout, group).shape[1])
    seconds = found.seconds(op, group, payload)
    if n == 1:
        assert seconds == 0
        return
    link = system.links[found.link(group)]
    peak = link.bandwidth.known("bandwidth")
    if link.per == "device" and found.link(group) == "inter-node":
        peak *= system.devices_per_node.known("devices_per_node")
    assert seconds >= RING_PASSES[op] * payload * (n - 1) / n / peak * (1 - 1e-9)


@given(networks(), st.sampled_from(OPS), st.sampled_from(GROUPS), payloads, st.floats(1, 100))
def test_more_bandwidth_is_never_slower(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, times: float
) -> None:
    system, layout = drawn
    before = Network(system, layout)
    for name, link in system.links.items():
        faster = Network(with_link(system, name, bandwidth=link.bandwidth.known("bandwidth") * times), layout)
        assert faster.seconds(op, group, payload) <= before.seconds(op, group, payload) * (1 + 1e-9)
        if layout.pp > 1:
            new_s, old_s = (each.send_seconds(payload, from_stage=0, to_stage=1) for each in (faster, before))
            assert 0 <= new_s <= old_s * (1 + 1e-9)


@given(networks(), st.sampled_from(GROUPS), payloads)
def test_an_all_reduce_takes_no_more_than_its_two_halves(
    drawn: tuple[System, Layout], group: str, payload: int
) -> None:
    found = Network(*drawn)
    halves = found.seconds("reduce_scatter", group, payload) + found.seconds("all_gather", group, payload)
    assert found.seconds("all_reduce", group, payload) <= halves * (1 + 1e-9)


def test_a_small_all_reduce_over_nodes_uses_a_tree() -> None:
    found = network("dgx2", tp=16, dp=64)
    ring = found._rings("dp", next(iter(found._node_counts)))[0]
    assert found.seconds("all_reduce", "dp", 1024) < ring.start + 2 * 63 * ring.between / 5
    assert found.seconds("reduce_scatter", "dp", 1024) > 63 * ring.between


# --- measured points


def calibrated(points: tuple[tuple[float, float], ...], ranks: int = 4, op: str = "all_reduce") -> System:
    link = Link(
        per="node",
        bandwidth=Quantity(value=None, source="a test"),
        collectives={op: Collective(points=points)},
        overlap_cost=number(0.25),
    )
    provenance = Provenance(date="2026-01-01", torch="2.6", ranks=ranks, repeats=3)
    return replace(discover(), links={"memory": link}, provenance=provenance)


def test_measured_points_replace_the_formula() -> None:
    system = calibrated(((1000, 1e-4), (1_000_000, 1e-2)))
    found = network(system, dp=4)
    assert found.seconds("all_reduce", "dp", 1000) == pytest.approx(1e-4)
    assert found.seconds("all_reduce", "dp", 500_500) == pytest.approx(5.05e-3)
    assert found.seconds("all_reduce", "dp", 1) == pytest.approx(1e-4)
    assert found.seconds("all_reduce", "dp", 3_000_000) == pytest.approx(3e-2)
    assert found.seconds("all_reduce", "tp", 1000) == 0
    assert found.overlap_cost == 0.25
    with pytest.raises(
        ConfigError, match=r"links.memory.bandwidth = 'unknown': this command needs the number"
    ):
        found.seconds("all_gather", "dp", 1000)


def test_overlap_cost_is_that_of_the_data_parallel_link() -> None:
    dgx2, costs = load_system_file("dgx2"), {"nvlink": 0.1, "inter-node": 0.3}
    links = {name: replace(dgx2.links[name], overlap_cost=number(cost)) for name, cost in costs.items()}
    both = replace(dgx2, links={**dgx2.links, **links})
    assert network(both, dp=2).overlap_cost == 0.1
    assert network(both, dp=32).overlap_cost == 0.3
    assert network(both, tp=2).overlap_cost == 0.3
    assert network(replace(dgx2, links={})).overlap_cost == 0, "one device sends no messages"


def test_measured_rings_are_scaled_to_smaller_groups() -> None:
    """Points of a ring without latency: seconds = 2 (n - 1) / n * bytes / rate, for any n."""
    rate = 1e9
    points = tuple((size, 1.5 * size / rate) for size in (1000.0, 10_000.0, 1e6, 1e8))
    found = network(calibrated(points), tp=2, dp=2)
    assert found.seconds("all_reduce", "tp", 400_000) == pytest.approx(400_000 / rate)


def flat(seconds: float) -> tuple[tuple[float, float], ...]:
    """Return points of a collective that takes `seconds` whatever its payload is."""
    return ((1000.0, seconds), (1e6, seconds))


def with_collective(system: System, link: str, collective: Collective) -> System:
    """Return `system` with the measured `all_reduce` on `link`."""
    changed = replace(system.links["memory"], collectives={"all_reduce": collective})
    return replace(system, links=system.links | {link: changed})


def test_the_most_similar_measured_group_counts() -> None:
    """A group of equal size and stride counts first. Other sizes are scaled from the nearest measured size."""

    measured = Collective(
        points=flat(8e-3),
        groups=(
            Collective(points=flat(1e-3), ranks=2),
            Collective(points=flat(2e-3), ranks=2, stride=4),
            Collective(points=flat(4e-3), ranks=4, stride=2),
        ),
    )
    system = with_collective(calibrated(flat(1), ranks=8), "memory", measured)
    halves = network(system, tp=2, dp=4)
    assert halves.seconds("all_reduce", "tp", 5000) == pytest.approx(1e-3)
    assert halves.seconds("all_reduce", "dp", 5000) == pytest.approx(4e-3)
    assert halves.seconds("all_reduce", "world", 5000) == pytest.approx(8e-3)
    assert network(system, tp=4, dp=2).seconds("all_reduce", "dp", 5000) == pytest.approx(2e-3)
    assert network(system, tp=3, dp=1).seconds("all_reduce", "tp", 5000) == pytest.approx(4e-3 * 2 / 3)


def test_link_class_and_members_per_node_select_the_measurement() -> None:
    """Two nodes have two processes each. The link class and the members per node select the measurement."""

    system = replace(calibrated(flat(1)), devices_per_node=number(2))
    across = Collective(
        points=flat(8e-3),
        per_node=2,
        groups=(Collective(points=flat(4e-3), ranks=2, per_node=1, stride=2),),
    )
    system = with_collective(system, "inter-node", across)
    system = with_collective(system, "memory", Collective(points=flat(1e-3), ranks=2))
    found = network(system, tp=2, dp=2)
    assert (found.link("tp"), found.link("dp")) == ("memory", "inter-node")
    assert found.seconds("all_reduce", "tp", 5000) == pytest.approx(1e-3)
    assert found.seconds("all_reduce", "dp", 5000) == pytest.approx(4e-3)
    assert network(system, dp=4).seconds("all_reduce", "dp", 5000) == pytest.approx(8e-3)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 30), st.floats(1e-7, 10)),
        min_size=1,
        max_size=6,
        unique_by=lambda p: p[0],
    ),
    payloads,
    payloads,
)
def test_seconds_do_not_fall_with_payload(points: list[tuple[int, float]], one: int, other: int) -> None:
    measured = Collective(points=tuple(sorted(points)))
    less, more = sorted((one, other))
    assert 0 < interpolate(measured, less) <= interpolate(measured, more) * (1 + 1e-12)


def test_messages_between_stages_use_measured_points() -> None:
    found = network(calibrated(((1000, 1e-4), (2000, 2e-4)), op="send"), pp=4)
    assert found.send_seconds(1500, from_stage=0, to_stage=1) == pytest.approx(1.5e-4)
    assert found.send_seconds(1500, from_stage=3, to_stage=0) == pytest.approx(1.5e-4)
    assert found.send_seconds(1500, from_stage=1, to_stage=1) == 0


# --- missing links and imports


def test_a_missing_inter_node_link_is_an_error() -> None:
    alone = load_system_file("selene")
    alone = replace(alone, links={"nvlink": alone.links["nvlink"]})
    with pytest.raises(
        ConfigError, match="links = 'inter-node': must be a link class of this system: nvlink"
    ):
        network(alone, dp=16).seconds("all_reduce", "dp", 1000)


def test_the_network_model_needs_no_torch() -> None:
    code = "import sys, repro.simulate.time.network; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
