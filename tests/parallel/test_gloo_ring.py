"""A ring over nodes: the same sums and parts as messages straight between ranks, sent to the next rank alone."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel.transports import GlooRing, GlooTransport, needs_ring
from tests.pool import RankPool
from tests.training import tiny, train


def test_which_groups_go_round_a_ring() -> None:
    everyone, columns, rows = range(16), range(0, 16, 4), range(4, 8)
    assert needs_ring(everyone, 4)
    assert not needs_ring(columns, 4), "one rank on each node: nothing shares a node's link twice"
    assert not needs_ring(rows, 4), "inside a node"
    assert not needs_ring(everyone, 16), "one node"
    assert needs_ring((0, 1, 4), 4)


def collectives(ring: bool) -> dict[str, Any]:
    """What a reduce-scatter and an all-gather give on this rank, and to whom the first sent how many bytes."""
    group = dist.group.WORLD
    assert group is not None
    transport = (GlooRing if ring else GlooTransport)(group)
    n, rank = transport.size, transport.rank
    complete = torch.arange(n * 6, dtype=torch.float32) * (rank + 1)
    part, gathered = torch.empty(6), torch.empty(n * 6)
    sent: Counter[int] = Counter()
    real = dist.isend

    def isend(tensor: torch.Tensor, dst: int, **keys: Any) -> Any:
        sent[dst] += tensor.numel() * tensor.element_size()
        return real(tensor, dst, **keys)

    dist.isend = isend
    try:
        reduced = transport.reduce_scatter(part, complete)
        reduced.wait()
        scattered = dict(sent)
        first = transport.all_gather(gathered, part)
        again = transport.all_gather(torch.empty(n * 6), part)  # two under way keep their order
        first.wait()
        again.wait()
    finally:
        dist.isend = real
    return {"part": part.tolist(), "gathered": gathered.tolist(), "sent": scattered, "rank": rank}


def test_a_ring_gives_what_straight_messages_give(four: RankPool) -> None:
    for round_, straight in zip(four.run(collectives, True), four.run(collectives, False), strict=True):
        assert round_["part"] == straight["part"]
        assert round_["gathered"] == straight["gathered"]
        assert sum(round_["sent"].values()) == sum(straight["sent"].values())
        assert list(round_["sent"]) == [(round_["rank"] + 1) % 4]
        assert len(straight["sent"]) == 3


def sum_of_sixteen_bits() -> list[float]:
    """Of one that is large and others that each are lost beside it in bf16."""
    group = dist.group.WORLD
    assert group is not None
    part = torch.empty(1, dtype=torch.bfloat16)
    complete = torch.full((group.size(),), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16)
    GlooTransport(group).reduce_scatter(part, complete).wait()
    return part.tolist()


def test_straight_messages_are_summed_in_fp32_and_rounded_once(four: RankPool) -> None:
    """By hand: 256 + 1 is 256 in bf16, but 259 rounds to 260."""
    assert four.run(sum_of_sixteen_bits) == [[260.0]] * 4


def on_two_nodes(zero: int, ranks_per_node: str) -> tuple[list[float], str]:
    """Losses of four replicas, and what carries their messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", ranks_per_node)
        experiment = tiny(Layout(dp=4, zero=zero))
        carrier = meshes.distributed_mesh(experiment.layout, "cpu").dp.transport
        return train(experiment).loss, type(carrier).__name__


@pytest.mark.parametrize("zero", [1, 3])
def test_training_over_nodes_is_the_same(four: RankPool, zero: int) -> None:
    over, inside = four.run(on_two_nodes, zero, "2"), four.run(on_two_nodes, zero, "4")
    for (ring, carrier), (straight, usual) in zip(over, inside, strict=True):
        assert (carrier, usual) == ("GlooRing", "GlooTransport")
        assert ring == pytest.approx(straight, rel=1e-6)


def thread_of_a_ring_ends() -> tuple[int, bool]:
    """Threads that a ring started, and whether they go on after it."""
    before = set(threading.enumerate())
    ring = GlooRing(dist.group.WORLD)
    ring.reduce_scatter(torch.empty(4), torch.ones(4 * dist.get_world_size())).wait()
    started = [t for t in threading.enumerate() if t not in before and t.name == "gloo ring"]
    del ring
    gc.collect()
    for thread in started:
        thread.join(60)
    return len(started), any(thread.is_alive() for thread in started)


def test_a_ring_that_nobody_holds_leaves_no_thread(two: RankPool) -> None:
    assert two.run(thread_of_a_ring_ends) == [(1, False)] * 2
