"""A network that narrows above pods: by hand, and what holds on any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError, Layout
from repro.config.system import System
from repro.config.systems import load_system_file
from repro.parallel.ledger import RING_PASSES
from repro.simulate.placement import GROUPS
from repro.simulate.time.network import Network
from tests.simulate.time.networks import networks, number, payloads, with_link

OPS = tuple(RING_PASSES)
NODE = 400e9 * 0.96
"""Bytes/s of a DGX H100's eight adapters."""


def narrow(pod: int, oversubscription: float, system: System | None = None) -> System:
    full = system or load_system_file("dgx-h100")
    return with_link(full, "inter-node", pod=pod, oversubscription=oversubscription)


def network(system: System, **layout: Any) -> Network:
    return Network(system, Layout(**layout))


def test_rings_of_a_few_groups_leave_a_pod_as_if_nothing_narrowed() -> None:
    """Eight rings a pod of 8 nodes, one for each adapter: all of them together ask for one node's bandwidth."""
    plain = network(load_system_file("dgx-h100"), tp=8, dp=16).bus_bandwidth("dp")
    assert plain == pytest.approx(NODE / 8)
    for factor, share in ((7, 1), (8, 1), (16, 2), (32, 4)):
        found = network(narrow(8, factor), tp=8, dp=16).bus_bandwidth("dp")
        assert found == pytest.approx(plain / share)


def test_every_pair_of_nodes_across_the_way_out_shares_it() -> None:
    """dp within 8 nodes outermost: 4 stages of 8 nodes, pods of 8, so each stage's whole traffic leaves its pod."""
    stages = {"tp": 8, "dp": 8, "pp": 4}
    plain, tapered = network(load_system_file("dgx-h100"), **stages), network(narrow(8, 7), **stages)
    latency = plain.number("inter-node", "latency_s")
    seconds = [each.send_seconds(10**9, from_stage=0, to_stage=1) - latency for each in (plain, tapered)]
    assert seconds[1] == pytest.approx(7 * seconds[0])
    assert tapered.seconds("all_reduce", "dp", 10**9) == plain.seconds("all_reduce", "dp", 10**9)
    # Pods of 16 nodes hold stages 0 and 1: what they send each other stays inside.
    larger = network(narrow(16, 7), **stages)
    assert larger.send_seconds(10**9, from_stage=0, to_stage=1) - latency == pytest.approx(seconds[0])
    # From 1 to 2 eight nodes send where a pod's way out is 16 / 7 of a node.
    crossing = larger.send_seconds(10**9, from_stage=1, to_stage=2) - latency
    assert crossing == pytest.approx(seconds[0] * 8 / (16 / 7))


def test_what_comes_in_shares_the_way_in() -> None:
    """Ring of stages: the last one's pod is its own, and the first one's as well; each way is counted for itself."""
    found = network(narrow(1, 4), tp=8, pp=2)
    latency = found.number("inter-node", "latency_s")
    there, back = (found.send_seconds(10**9, from_stage=one, to_stage=1 - one) - latency for one in (0, 1))
    assert there == back == pytest.approx(10**9 / (NODE / 8 / 4))


factors = st.floats(1, 50)
several_nodes = networks().filter(lambda drawn: "inter-node" in drawn[0].links)


@given(several_nodes, st.sampled_from(OPS), st.sampled_from(GROUPS), payloads, factors, factors)
def test_more_oversubscription_is_never_faster(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, one: float, other: float
) -> None:
    system, layout = drawn
    less, more = (
        Network(with_link(system, "inter-node", oversubscription=x), layout) for x in sorted((one, other))
    )
    assert less.seconds(op, group, payload) <= more.seconds(op, group, payload)
    if layout.pp > 1:
        now, then = (each.send_seconds(payload, from_stage=0, to_stage=1) for each in (less, more))
        assert now <= then


@given(several_nodes, st.sampled_from(OPS), st.sampled_from(GROUPS), payloads, st.integers(1, 64))
def test_no_oversubscription_changes_nothing(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, pod: int
) -> None:
    """Whatever the pods are, to the last bit; and a little changes little, since a pod's nodes use no more than all."""
    system, layout = drawn
    flat = with_link(system, "inter-node", pod=1, oversubscription=1)
    pods = with_link(flat, "inter-node", pod=pod)
    before, after = Network(flat, layout), Network(pods, layout)
    assert after.seconds(op, group, payload) == before.seconds(op, group, payload)
    nearly = Network(with_link(pods, "inter-node", oversubscription=1 + 1e-9), layout)
    assert nearly.bus_bandwidth(group) == pytest.approx(before.bus_bandwidth(group), rel=1e-8)
    if layout.pp > 1:
        then = before.send_seconds(payload, from_stage=0, to_stage=1)
        assert after.send_seconds(payload, from_stage=0, to_stage=1) == then
        assert nearly.send_seconds(payload, from_stage=0, to_stage=1) == pytest.approx(then, rel=1e-8)


@given(several_nodes, st.sampled_from(OPS), st.sampled_from(GROUPS), payloads, factors)
def test_a_group_inside_its_pod_is_not_concerned(
    drawn: tuple[System, Layout], op: str, group: str, payload: int, factor: float
) -> None:
    system, layout = drawn
    full = narrow(layout.world, 1, system)  # as many nodes as ranks: one pod holds all
    tapered = narrow(layout.world, factor, system)
    one, other = Network(full, layout), Network(tapered, layout)
    assert one.seconds(op, group, payload) == other.seconds(op, group, payload)


@pytest.mark.parametrize(("key", "value"), [("oversubscription", 0.5), ("pod", 1.5), ("pod", 0)])
def test_what_cannot_be_is_refused(key: str, value: float) -> None:
    link = load_system_file("dgx-h100").links["inter-node"]
    with pytest.raises(ConfigError, match=key):
        replace(link, **{key: number(value)})
