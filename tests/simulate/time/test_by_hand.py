"""Tests with seconds calculated by hand: operators, collectives and schedules on a system of round numbers.

A wrong constant does not change laws and ratios, but fails these tests.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
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
from repro.simulate.time.schedule import schedule
from repro.simulate.trace.events import HOST_VIEWS, HOST_WAIT, Message, Operator, Timed, Wait
from tests.simulate.time.networks import Wire, number, numbers

US = 1e-6
SQUARE = ((1, 2, 12, 8),) * 3
LAST_THIRD = ((1, 2, 4, 8), (1, 2, 12, 8), (1, 2, 12, 8))
"""Shapes of queries, keys and values."""


def machine() -> System:
    """Return a system with four multiprocessors, 1 us per step of K with a tile of 256 x 128, and half of 2 TB/s.
    A kernel takes 3 us in addition to its work, and 2 us more if it is memory-bound."""
    base, step_flops = systems.load_system_file("dgx2"), 2 * 256 * 128
    efficiency = numbers(matmul_efficiency=0.5, memory_efficiency=0.5, multiprocessors=4)
    time = DeviceTime(**efficiency, **numbers(kernel_s=3 * US, fill_s=2 * US, launch_s=10 * US))
    peaks = numbers(fp16=2 * 4 * step_flops / US, fp32=4 * step_flops / US)
    device = replace(base.device, peak_flops=peaks, memory_bandwidth=number(2e12), time=time, operators={})
    inside = numbers(bandwidth=20e9, efficiency=1, latency_s=1 * US, start_s=10 * US)
    between = numbers(bandwidth=20e9, efficiency=0.5, latency_s=5 * US, start_s=10 * US)
    links = {
        "nvlink": Link(per="device", **inside),
        "inter-node": Link(per="node", **between),
        "pcie": Link(per="device", **numbers(bandwidth=16e9, efficiency=0.5)),
    }
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
)
def test_operator_seconds_equal_the_calculation_by_hand(operator: Operator, seconds: float) -> None:
    for factor in (1.0, 1.5):
        cost = DeviceCost(machine(), "fp16", kernels=Kernels(factor, factor))
        assert cost.seconds(operator) == pytest.approx(factor * seconds, rel=1e-9)


ADD = Operator("aten.add", 0, 1, 1, (), 2)
VIEWS = Operator(HOST_VIEWS, 0, 0, 0, (), 2, calls=8)
REDUCED = Message("all_reduce", "tp", 2, 8, 8, "block", work=7)


def items_of(
    events: list[Timed],
    collective_s: float = 0.0,
    phase: str = FORWARD,
    exchanged: int = 1,
    operator_us: float = 4,
    **host_us: float,
) -> list[Item]:
    """Return the items of events. An operator takes 4 us, and 10 us of the host, if no other time is given.

    Every collective takes `collective_s` and has `exchanged` messages.
    """
    host = dict.fromkeys(("launch", "operator", "backward"), 10) | host_us
    of_host = {f"{key}_s": host.get(key, 0) * US for key in (*host, "jitter", "message", "exchange")}
    cost: Any = SimpleNamespace(
        seconds=lambda operator: 0.0 if operator.name == HOST_VIEWS else operator_us * US, **of_host
    )
    outlines, keys = EventOutlines(), (7, 8)
    compiler = ProgramCompiler(
        cost,
        lambda message: collective_s,
        {key: (key,) for key in keys},
        0,
        lambda op, group: exchanged,
        outlines,
    )
    return compiler.timed(outlines.stretches(events, keys), phase)


def test_a_device_waits_for_a_late_host() -> None:
    """Three operators take 30 us of the host and 12 us of the device. After a long collective the host is ahead."""
    (late,) = items_of([ADD, ADD, ADD])
    assert late.seconds == pytest.approx(30 * US)
    assert dict(late.parts) == pytest.approx({"elementwise": 12 * US, "host": 18 * US})
    assert items_of([ADD._replace(calls=3)]) == [
        OperatorBlock(30 * US, (("elementwise", 4 * US), ("host", 26 * US)))
    ]
    (long,) = items_of([ADD, REDUCED, Wait(7)], 100 * US)
    assert long.seconds == pytest.approx(104 * US)
    assert dict(long.parts) == pytest.approx({"elementwise": 4 * US, "all-reduce of block (tp)": 100 * US})


@pytest.mark.parametrize(
    ("events", "phase", "host_us"),
    [
        ([ADD, ADD, REDUCED, Wait(7)], FORWARD, 3 * 44),
        ([ADD, ADD], OPTIMIZER, 2 * 7),
        ([VIEWS, ADD._replace(calls=3)], FORWARD, 11 * 7),
    ],
)
def test_layers_take_more_host_time_than_updates_and_lists(
    events: list[Timed], phase: str, host_us: int
) -> None:
    """Operators and collectives of a layer take 44 us of the host; those of updates and lists take 7 us."""
    (block,) = items_of(events, US, phase, launch=7, operator=44, backward=44)
    assert block.seconds == pytest.approx(host_us * US)


def test_views_are_hidden_unless_the_host_waits() -> None:
    """An operator of 100 us hides 8 views of 10 us. If the host waits before the views, they are exposed."""
    (hidden,) = items_of([ADD, VIEWS], operator_us=100)
    waiting = [ADD, Operator(HOST_WAIT, 0, 0, 0, (), 0), VIEWS]
    before, exposed = items_of(waiting, operator_us=100)
    assert (hidden.seconds, before.seconds) == pytest.approx((100 * US, 100 * US))
    assert dict(exposed.parts) == pytest.approx({"elementwise": 0.0, HOST: 80 * US})


def test_a_cpu_spends_host_time_on_messages() -> None:
    """A message takes 50 us of the CPU, in addition to 4 us of an operator and 100 us of a collective."""
    sent = Message("send", "pp", 2, 8, 8, "activations", work=9, peer=1)
    events = [ADD, REDUCED, Wait(7), sent, ADD, REDUCED._replace(work=8), ADD, Wait(8)]
    inline, send, begun, *hidden = items_of(events, 100 * US, operator=0, backward=0, message=50)
    assert inline.seconds == pytest.approx((4 + 50 + 100 + 2 * 50) * US)
    assert dict(inline.parts)[HOST] == pytest.approx(150 * US), "one message is sent and one is received"
    assert begun.seconds == pytest.approx(54 * US)
    assert [type(item) for item in (send, *hidden)] == [Send, Issue, OperatorBlock, Await]


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
    message = Message(op, "dp", size, 8, 8, "parameters", work=7, peer=1)
    of_cpu = {"operator": 0, "backward": 0, "message": 50, "exchange": 20}
    block, _ = items_of([message], exchanged=messages_of(op, size), **of_cpu)
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


def scheduled(forward: list[Item], backward: list[Item], tail: list[Item], overlap_cost: float = 0.0) -> Any:
    """Schedule one micro-batch on one stage.

    Return the step time, and the overlap cost, exposed time and total time of the collective `x`.
    """
    segments = {Action(FORWARD, 0, 0): forward, Action(BACKWARD, 0, 0): backward}
    program = StageProgram(segments, tail, micro_batches=1)
    found = schedule(Layout(dp=2), [program], Wire(0.25), overlap_cost=overlap_cost)
    (stage,) = found.stages
    return found.step_s, stage.busy["overlap"], stage.exposed["x"], stage.communication["x"]


def test_a_late_rank_delays_the_collective_and_not_compute() -> None:
    """Compute of 1 s, a collective of 1 s that starts 0.5 s late, and compute of 1 s in parallel."""
    block = OperatorBlock(1.0, (("matmul", 1.0),))
    found = scheduled([block, Issue(("x",), "dp", "x", 1.0, 0.5), block], [Await(("x",))], [])
    assert found == pytest.approx((2.5, 0.0, 0.5, 1.0))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    ("communication_s", "overlap_cost", "expected"),
    [
        (1.5, 0.0, (2.0, 0.0, 0.0)),
        (3.0, 0.0, (3.0, 0.0, 1.0)),
        # The first block runs at half speed during the 1 s of the collective, so it takes 1.5 s.
        (1.0, 0.5, (2.5, 0.5, 0.0)),
        # The first block takes 2 s at half speed, and the second block runs at half speed for 1 s.
        (3.0, 0.5, (3.5, 1.5, 0.0)),
        # Both blocks run at half speed; afterwards the collective costs nothing, since no block runs.
        (10.0, 0.5, (10.0, 2.0, 6.0)),
    ],
)
def test_overlap_cost_is_limited_to_the_overlapped_compute(
    communication_s: float, overlap_cost: float, expected: tuple[float, ...], blocks: int
) -> None:
    """Each pass has 1 s of compute in one block or in two, which the schedule may join. The values are step time,
    overlap cost and exposed time."""
    compute = [OperatorBlock(1 / blocks, (("matmul", 1 / blocks),))] * blocks
    gather = Issue(("x",), "dp", "x", communication_s)
    found = scheduled([gather, *compute], compute, [Await(("x",))], overlap_cost)
    assert found == pytest.approx((*expected, communication_s))
