"""Tests with seconds calculated by hand: operators, collectives and schedules on a system of round numbers.

A wrong constant does not change laws and ratios, but fails these tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from repro.config import Layout, systems
from repro.config.links import Collective, Link
from repro.config.system import System
from repro.config.timing import DeviceTime
from repro.parallel.ledger import messages_of
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD, Action
from repro.simulate.time.device import DeviceCost, Kernels
from repro.simulate.time.emulated import ring_step_times
from repro.simulate.time.interconnect import Ring
from repro.simulate.time.network import Network
from repro.simulate.time.outlines import EventOutlines
from repro.simulate.time.program import (
    HOST,
    OPTIMIZER,
    Await,
    Issue,
    Item,
    OperatorBlock,
    ProgramCompiler,
    Send,
    StageProgram,
)
from repro.simulate.time.schedule import Timeline, schedule
from repro.simulate.trace.events import HOST_VIEWS, HOST_WAIT, Message, Operator, Timed, Wait
from tests.simulate.time.networks import Wire, number

US = 1e-6
SQUARE = ((1, 2, 12, 8),) * 3
LAST_THIRD = ((1, 2, 4, 8), (1, 2, 12, 8), (1, 2, 12, 8))
"""Shapes of queries, keys and values."""


def machine() -> System:
    """Return a system with four multiprocessors, 1 us per step of K with a tile of 256 x 128, and half of 2 TB/s.
    A kernel takes 3 us in addition to its work, and 2 us more if it is memory-bound."""
    base = systems.load_system_file("dgx2")
    time = DeviceTime(
        matmul_efficiency=number(0.5),
        memory_efficiency=number(0.5),
        multiprocessors=number(4),
        kernel_s=number(3 * US),
        fill_s=number(2 * US),
        launch_s=number(10 * US),
    )
    step_flops = 2 * 256 * 128
    device = replace(
        base.device,
        peak_flops={"fp16": number(2 * 4 * step_flops / US), "fp32": number(4 * step_flops / US)},
        memory_bandwidth=number(2e12),
        time=time,
        operators={},
    )
    inside = Link(
        per="device",
        bandwidth=number(20e9),
        efficiency=number(1),
        latency_s=number(1 * US),
        start_s=number(10 * US),
    )
    between = Link(
        per="node",
        bandwidth=number(20e9),
        efficiency=number(0.5),
        latency_s=number(5 * US),
        start_s=number(10 * US),
    )
    host = Link(per="device", bandwidth=number(16e9), efficiency=number(0.5))
    links = {"nvlink": inside, "inter-node": between, "pcie": host}
    return replace(base, device=device, links=links, devices_per_node=number(4))


def product(m: int, n: int, k: int, itemsize: int = 2) -> Operator:
    return Operator("aten.mm", 2 * m * n * k, 0, 0, ((m, k), (k, n)), itemsize)


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        # 1 x 4 tiles of 256 x 128 are one wave of four; 1000 steps of K and a prologue of 64, and the kernel's 3 us.
        (product(256, 512, 1000), (1064 + 3) * US),
        # fp32 has half the rate.
        (product(256, 512, 1000, itemsize=4), (2128 + 3) * US),
        # One tile with K split in four; then 5 copies of 256 x 128 fp32 numbers move at 1 TB/s.
        (product(256, 128, 4096), (1024 + 64 + 3) * US + 5 * 4 * 256 * 128 / 1e12),
        # Fused attention: half of the square is masked, and the rate is 0.7 of the products' 262 GFLOP/s.
        (
            Operator("aten._scaled_dot_product_flash_attention", 1_000_000_000, 0, 0, SQUARE, 2),
            0.5e9 / (0.7 * 4 * 65536 / US) + 3 * US,
        ),
        (Operator("aten._scaled_dot_product_flash_attention", 2, 10**9, 10**9, SQUARE, 2), 2e-3 + 3 * US),
        # Queries in the last third of the keys: a sixth of the scores is masked.
        (
            Operator("aten._scaled_dot_product_flash_attention", 1_000_000_000, 0, 0, LAST_THIRD, 2),
            5 / 6 * 1e9 / (0.7 * 4 * 65536 / US) + 3 * US,
        ),
        (Operator("aten.add", 0, 3 * 10**9, 10**9, (), 2), 4e-3 + 5 * US),
        (Operator("aten.embedding", 0, 10**12, 10**9, (), 2), 2e-3 + 5 * US),
        (Operator("host copy", 0, 10**9, 8 * 10**9, (), 2), 1.0 + 5 * US),
        (Operator("aten.add", 0, 2, 2, (), 2), 5 * US + 4e-12),
        # Four kernels with the same total of bytes.
        (Operator("aten.add", 0, 3 * 10**9, 10**9, (), 2, calls=4), 4e-3 + 4 * 5 * US),
        # Operators of the host alone.
        (Operator(HOST_VIEWS, 0, 0, 0, (), 2, calls=1000), 0.0),
        (Operator(HOST_WAIT, 0, 0, 0, (), 0), 0.0),
    ],
    ids=[
        *("one wave", "fp32", "split", "attention", "operands of attention", "attention of a chunk", "bytes"),
        *("rows", "host copy", "shortest kernel", "kernels", "views", "a wait"),
    ],
)
def test_operator_seconds_equal_the_calculation_by_hand(operator: Operator, seconds: float) -> None:
    cost = DeviceCost(machine(), "fp16")
    assert cost.seconds(operator) == pytest.approx(seconds, rel=1e-9)
    assert DeviceCost(machine(), "fp16", kernels=Kernels(1.5, 1.5)).seconds(operator) == pytest.approx(
        1.5 * seconds, rel=1e-9
    )


def items_of(
    cost: object,
    events: list[Timed],
    seconds: float = 0.0,
    keys: Sequence[int] = (7, 8),
    phase: str = FORWARD,
    exchanged: int = 1,
) -> list[Item]:
    """Return the items of events, in which every collective takes `seconds` and has `exchanged` messages."""
    outlines = EventOutlines()
    compiler = ProgramCompiler(
        cost,  # type: ignore[arg-type]
        lambda message: seconds,
        {key: (key,) for key in keys},
        0,
        lambda op, group: exchanged,
        outlines,
    )
    return compiler.timed(outlines.stretches(events, keys), phase)


class ConstantCost:
    """Cost of 4 us per operator, and of 10 us of the host to issue an operator."""

    launch_s = operator_s = backward_s = 10 * US
    jitter_s = message_s = exchange_s = 0.0

    def seconds(self, operator: Operator) -> float:
        return 4 * US


def test_a_device_waits_for_a_late_host() -> None:
    """Three operators take 30 us of the host and 12 us of the device. After a long collective the host is ahead."""
    add = Operator("aten.add", 0, 1, 1, (), 2)
    reduced = Message("all_reduce", "tp", 2, 8, 8, "block", work=7)
    (late,) = items_of(ConstantCost(), [add, add, add])
    assert isinstance(late, OperatorBlock)
    assert late.seconds == pytest.approx(30 * US)
    assert dict(late.parts) == pytest.approx({"elementwise": 12 * US, "host": 18 * US})
    assert items_of(ConstantCost(), [add._replace(calls=3)]) == [
        OperatorBlock(30 * US, (("elementwise", 4 * US), ("host", 26 * US)))
    ]
    (long,) = items_of(ConstantCost(), [add, reduced, Wait(7)], 100 * US)
    assert isinstance(long, OperatorBlock)
    assert long.seconds == pytest.approx(104 * US)
    assert dict(long.parts) == pytest.approx({"elementwise": 4 * US, "all-reduce of block (tp)": 100 * US})


def test_layers_take_more_host_time_than_updates_and_lists() -> None:
    """Operators and collectives of a layer take 44 us of the host; those of updates and lists take 7 us."""

    class MegatronCost(ConstantCost):
        launch_s, operator_s, backward_s = 7 * US, 44 * US, 44 * US

    add, views = Operator("aten.add", 0, 1, 1, (), 2), Operator(HOST_VIEWS, 0, 0, 0, (), 2, calls=8)
    reduced = Message("all_reduce", "tp", 2, 8, 8, "block", work=7)
    for events, phase, host in (
        ([add, add, reduced, Wait(7)], FORWARD, 3 * 44),
        ([add, add], OPTIMIZER, 2 * 7),
        ([views, add._replace(calls=3)], FORWARD, 11 * 7),
    ):
        (block,) = items_of(MegatronCost(), events, US, phase=phase)
        assert isinstance(block, OperatorBlock)
        assert block.seconds == pytest.approx(host * US)


def test_views_are_hidden_unless_the_host_waits() -> None:
    """An operator of 100 us hides 8 views of 10 us. If the host waits before the views, they are exposed."""

    class LongOperatorCost(ConstantCost):
        def seconds(self, operator: Operator) -> float:
            return 0.0 if operator.name == HOST_VIEWS else 100 * US

    add, views = Operator("aten.add", 0, 1, 1, (), 2), Operator(HOST_VIEWS, 0, 0, 0, (), 2, calls=8)
    (hidden,) = items_of(LongOperatorCost(), [add, views])
    assert isinstance(hidden, OperatorBlock)
    assert hidden.seconds == pytest.approx(100 * US)
    before, exposed = items_of(LongOperatorCost(), [add, Operator(HOST_WAIT, 0, 0, 0, (), 0), views])
    assert isinstance(before, OperatorBlock)
    assert isinstance(exposed, OperatorBlock)
    assert before.seconds == pytest.approx(100 * US)
    assert dict(exposed.parts) == pytest.approx({"elementwise": 0.0, HOST: 80 * US})


def test_a_cpu_spends_host_time_on_messages() -> None:
    """A message takes 50 us of the CPU, in addition to 4 us of an operator and 100 us of a collective."""

    class CpuCost(ConstantCost):
        operator_s, backward_s, message_s = 0.0, 0.0, 50 * US

    reduced, hidden = (Message("all_reduce", "tp", 2, 8, 8, "block", work=n) for n in (7, 8))
    sent = Message("send", "pp", 2, 8, 8, "activations", work=9, peer=1)
    add = Operator("aten.add", 0, 1, 1, (), 2)
    inline, send, begun, *hidden_ = items_of(
        CpuCost(), [add, reduced, Wait(7), sent, add, hidden, add, Wait(8)], 100 * US
    )
    assert isinstance(inline, OperatorBlock)
    assert inline.seconds == pytest.approx((4 + 50 + 100 + 2 * 50) * US)
    assert dict(inline.parts)[HOST] == pytest.approx(150 * US), "one message is sent and one is received"
    assert isinstance(send, Send)
    assert isinstance(begun, OperatorBlock)
    assert begun.seconds == pytest.approx(54 * US)
    assert [type(item) for item in hidden_] == [Issue, OperatorBlock, Await]


@pytest.mark.parametrize(
    ("op", "size", "cpu_us"),
    [
        ("all_reduce", 16, 50),
        ("broadcast", 16, 50),
        ("all_gather", 16, 30 * 20),
        ("reduce_scatter", 4, 6 * 20),
        ("send", 2, 2 * 50),
    ],
)
def test_a_gloo_exchange_has_messages_with_every_other_rank(op: str, size: int, cpu_us: int) -> None:
    """Exchanged messages take 20 us each. A collective of gloo and each sent or received message take 50 us."""

    class CpuCost(ConstantCost):
        operator_s, backward_s, message_s, exchange_s = 0.0, 0.0, 50 * US, 20 * US

    message, counted = Message(op, "dp", size, 8, 8, "parameters", work=7, peer=1), messages_of(op, size)
    block, _ = items_of(CpuCost(), [message], exchanged=counted)
    assert isinstance(block, OperatorBlock)
    assert block.seconds == pytest.approx(cpu_us * US)


RING = Ring(ranks=8, nodes=2, rate=1e9, start=10 * US, inside=1 * US, between=5 * US, half=0, chunk=0.4 * US)
"""Ring with fourteen hops of an all-reduce, two of them between nodes, and seven hops of each half, one between."""


@pytest.mark.parametrize(
    ("op", "payload", "seconds"),
    [
        ("reduce_scatter", 8 * 10**9, (10 + 6 + 5) * US + 7),
        ("all_gather", 8 * 10**9, (10 + 6 + 5) * US + 7),
        ("broadcast", 8 * 10**9, (10 + 6 + 5) * US + 8),
        ("all_reduce", 8 * 10**9, (10 + 12 + 10) * US + 14),
        # A tree: three hops in a node and one between nodes with a chunk, up and down, at 0.9 of the rate.
        ("all_reduce", 0, (10 + 2 * (3 + 5)) * US),
        ("all_reduce", 90, (10 + 2 * (3 + 5 + 0.09)) * US + 0.2 * US),
        ("all_reduce", 900, (10 + 2 * (3 + 5 + 0.4)) * US + 2 * US),
    ],
)
def test_ring_seconds_equal_the_calculation_by_hand(op: str, payload: int, seconds: float) -> None:
    assert RING.seconds(op, payload) == pytest.approx(seconds, rel=1e-9)


def test_one_node_uses_no_tree() -> None:
    """Each of 14 hops has 1 MB and takes the time of 2 MB: 28 ms. A tree would take 20 ms."""
    ring = RING._replace(nodes=1, half=1e6)
    assert ring.seconds("all_reduce", 8 * 10**6) == pytest.approx((10 + 14) * US + 28e-3, rel=1e-9)
    across = RING._replace(half=1e6)
    assert across.seconds("all_reduce", 8 * 10**6) == pytest.approx((10 + 16.8) * US + 20e-3, rel=1e-9)
    assert across.seconds("all_reduce", 8 * 10**6, trees=False) == pytest.approx((10 + 22) * US + 28e-3)


def test_network_seconds_equal_the_calculation_by_hand() -> None:
    """Two nodes have four ranks each, 20 GB/s inside, and one adapter of 10 GB/s between the nodes."""
    found = Network(machine(), Layout(dp=8))
    assert found.seconds("all_reduce", "dp", 4 * 10**9) == pytest.approx((10 + 12 + 10) * US + 0.7, rel=1e-9)
    inside = Network(machine(), Layout(tp=4, dp=2))
    assert inside.seconds("all_gather", "tp", 4 * 10**9) == pytest.approx((10 + 3) * US + 0.15, rel=1e-9)
    # Four groups of two share the adapter of their nodes.
    assert inside.seconds("all_gather", "dp", 10**9) == pytest.approx((10 + 5) * US + 0.2, rel=1e-9)
    # Four ranks of a stage send a message each at the same time.
    stages = Network(machine(), Layout(tp=4, pp=2))
    assert stages.send_seconds(10**9, from_stage=0, to_stage=1) == pytest.approx(5 * US + 0.4, rel=1e-9)


def test_a_measured_ring_is_divided_into_its_steps() -> None:
    """Eight ranks send an eighth of the payload in each of 14 steps."""
    measured = Collective(points=((8e6, 14.0), (16e6, 28.0)))
    assert ring_step_times(measured, 8).points == ((1e6, 1.0), (2e6, 2.0))


def test_a_late_rank_delays_the_collective_and_not_compute() -> None:
    """Compute of 1 s, a collective of 1 s that starts 0.5 s late, and compute of 1 s in parallel."""
    block = OperatorBlock(1.0, (("matmul", 1.0),))
    segments: dict[Action, list[Any]] = {
        Action(FORWARD, 0, 0): [block, Issue(("x",), "dp", "sum", 1.0, 0.5), block],
        Action(BACKWARD, 0, 0): [Await(("x",))],
    }
    found = schedule(Layout(dp=2), [StageProgram(segments, [], micro_batches=1)], Wire(0.25))
    assert found.step_s == pytest.approx(2.5)
    assert found.stages[0].exposed["sum"] == pytest.approx(0.5)
    assert found.stages[0].communication["sum"] == pytest.approx(1.0)


def one_stage(communication_s: float, overlap_cost: float, blocks: int) -> Timeline:
    """Schedule 1 s of forward and 1 s of backward, with a collective that starts first and is awaited at the end."""
    second: list[Any] = [OperatorBlock(1 / blocks, (("matmul", 1 / blocks),))] * blocks
    segments: dict[Action, list[Any]] = {
        Action(FORWARD, 0, 0): [
            Issue(("x",), "dp", "gather", communication_s),
            *second,
        ],
        Action(BACKWARD, 0, 0): second,
    }
    program = StageProgram(segments, [Await(("x",))], micro_batches=1)
    return schedule(Layout(dp=2), [program], Wire(0.25), overlap_cost=overlap_cost)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    ("communication_s", "overlap_cost", "step_s", "overlap_s", "exposed_s"),
    [
        (1.5, 0.0, 2.0, 0.0, 0.0),
        (3.0, 0.0, 3.0, 0.0, 1.0),
        # The first block runs at half speed during the 1 s of the collective, so it takes 1.5 s.
        (1.0, 0.5, 2.5, 0.5, 0.0),
        # The first block takes 2 s at half speed, and the second block runs at half speed for 1 s.
        (3.0, 0.5, 3.5, 1.5, 0.0),
        # Both blocks run at half speed; afterwards the collective costs nothing, since no block runs.
        (10.0, 0.5, 10.0, 2.0, 6.0),
    ],
)
def test_overlap_cost_is_limited_to_the_overlapped_compute(
    communication_s: float,
    overlap_cost: float,
    step_s: float,
    overlap_s: float,
    exposed_s: float,
    blocks: int,
) -> None:
    """A second of compute in one block equals two blocks, which the schedule may join."""
    found = one_stage(communication_s, overlap_cost, blocks)
    (stage,) = found.stages
    assert found.step_s == pytest.approx(step_s)
    assert stage.busy["overlap"] == pytest.approx(overlap_s)
    assert stage.exposed["gather"] == pytest.approx(exposed_s)
    assert stage.communication["gather"] == pytest.approx(communication_s)
