"""Tests of oversubscription between pods of nodes, by hand and for random systems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError, Layout
from repro.config.system import System
from repro.config.systems import load_system_file
from repro.simulate.time.network import Network
from tests.simulate.time.networks import groups, network, networks, number, ops, payloads, with_link

NODE_BANDWIDTH = 400e9 * 0.96
"""Bytes/s of a DGX H100's eight adapters."""


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


@given(several_nodes, ops, groups, payloads, factors, factors)
def test_more_oversubscription_is_never_faster(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, one: float, other: float
) -> None:
    system, layout = drawn
    both = (with_link(system, "inter-node", oversubscription=x) for x in sorted((one, other)))
    less, more = (Network(each, layout) for each in both)
    assert less.seconds(op, group, payload) <= more.seconds(op, group, payload)
    if layout.pp > 1:
        less_s, more_s = (each.send_seconds(payload, from_stage=0, to_stage=1) for each in (less, more))
        assert less_s <= more_s


@given(several_nodes, ops, groups, payloads, st.integers(1, 64))
def test_pods_without_oversubscription_change_no_time(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, pod: int
) -> None:
    """Without oversubscription, pods of any size give equal bits. An oversubscription of 1 + 1e-9 changes little."""
    system, layout = drawn
    flat = with_link(system, "inter-node", pod=1, oversubscription=1)
    pods = with_link(flat, "inter-node", pod=pod)
    before, after = Network(flat, layout), Network(pods, layout)
    assert after.seconds(op, group, payload) == before.seconds(op, group, payload)
    nearly = Network(with_link(pods, "inter-node", oversubscription=1 + 1e-9), layout)
    assert nearly.bus_bandwidth(group) == pytest.approx(before.bus_bandwidth(group), rel=1e-8)
    if layout.pp > 1:
        expected_s = before.send_seconds(payload, from_stage=0, to_stage=1)
        assert after.send_seconds(payload, from_stage=0, to_stage=1) == expected_s
        assert nearly.send_seconds(payload, from_stage=0, to_stage=1) == pytest.approx(expected_s, rel=1e-8)


@given(several_nodes, ops, groups, payloads, factors)
def test_a_group_inside_one_pod_is_not_slowed(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, factor: float
) -> None:
    system, layout = drawn
    full = oversubscribed(layout.world, 1, system)  # as many nodes as ranks: one pod contains all
    tapered = oversubscribed(layout.world, factor, system)
    one, other = Network(full, layout), Network(tapered, layout)
    assert one.seconds(op, group, payload) == other.seconds(op, group, payload)


@pytest.mark.parametrize(("key", "value"), [("oversubscription", 0.5), ("pod", 1.5), ("pod", 0)])
def test_invalid_pods_and_oversubscription_are_errors(key: str, value: float) -> None:
    link = load_system_file("dgx-h100").links["inter-node"]
    with pytest.raises(ConfigError, match=key):
        replace(link, **{key: number(value)})
