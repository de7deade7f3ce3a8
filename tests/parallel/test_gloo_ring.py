"""Tests that a ring over nodes computes the results of direct messages and sends to the next rank only."""

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


def test_groups_with_several_ranks_on_several_nodes_use_rings() -> None:
    everyone, columns, rows = range(16), range(0, 16, 4), range(4, 8)
    assert needs_ring(everyone, 4)
    assert not needs_ring(columns, 4), "one rank per node, so no ranks share a link"
    assert not needs_ring(rows, 4), "all ranks on one node"
    assert not needs_ring(everyone, 16), "one node"
    assert needs_ring((0, 1, 4), 4)


def collectives(ring: bool) -> dict[str, Any]:
    """Return the results of a reduce-scatter and an all-gather, and the bytes that the first sent to each rank."""
    group = dist.group.WORLD
    assert group is not None
    transport = (GlooRing if ring else GlooTransport)(group)
    n, rank = transport.size, transport.rank
    complete = torch.arange(n * 6, dtype=torch.float32) * (rank + 1)
    part, gathered = torch.empty(6), torch.empty(n * 6)
    sent: Counter[int] = Counter()
    original = dist.isend

    def isend(tensor: torch.Tensor, dst: int, **keys: Any) -> Any:
        sent[dst] += tensor.numel() * tensor.element_size()
        return original(tensor, dst, **keys)

    dist.isend = isend
    try:
        reduced = transport.reduce_scatter(part, complete)
        reduced.wait()
        scattered = dict(sent)
        first = transport.all_gather(gathered, part)
        again = transport.all_gather(torch.empty(n * 6), part)  # concurrent gathers run in order
        first.wait()
        again.wait()
    finally:
        dist.isend = original
    return {"part": part.tolist(), "gathered": gathered.tolist(), "sent": scattered, "rank": rank}


def test_ring_and_direct_messages_give_equal_results(four: RankPool) -> None:
    for ring, direct in zip(four.run(collectives, True), four.run(collectives, False), strict=True):
        assert ring["part"] == direct["part"]
        assert ring["gathered"] == direct["gathered"]
        assert sum(ring["sent"].values()) == sum(direct["sent"].values())
        assert list(ring["sent"]) == [(ring["rank"] + 1) % 4]
        assert len(direct["sent"]) == 3


def sum_of_sixteen_bits() -> list[float]:
    """Return the sum of 256 of one rank and 1 of each other rank, in bf16."""
    group = dist.group.WORLD
    assert group is not None
    part = torch.empty(1, dtype=torch.bfloat16)
    complete = torch.full((group.size(),), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16)
    GlooTransport(group).reduce_scatter(part, complete).wait()
    return part.tolist()


def test_direct_messages_are_summed_in_fp32_and_rounded_once(four: RankPool) -> None:
    """256 + 1 rounds to 256 in bf16, but 259 rounds to 260."""
    assert four.run(sum_of_sixteen_bits) == [[260.0]] * 4


def train_on_nodes(zero: int, ranks_per_node: str) -> tuple[list[float], str]:
    """Return the losses of four replicas, and the class of the transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", ranks_per_node)
        experiment = tiny(Layout(dp=4, zero=zero))
        transport = meshes.distributed_mesh(experiment.layout, "cpu").dp.transport
        return train(experiment).loss, type(transport).__name__


@pytest.mark.parametrize("zero", [1, 3])
def test_losses_on_two_nodes_equal_those_on_one(four: RankPool, zero: int) -> None:
    two_nodes, one_node = four.run(train_on_nodes, zero, "2"), four.run(train_on_nodes, zero, "4")
    for (losses, ring), (expected, direct) in zip(two_nodes, one_node, strict=True):
        assert (ring, direct) == ("GlooRing", "GlooTransport")
        assert losses == pytest.approx(expected, rel=1e-6)


def threads_of_a_freed_ring() -> tuple[int, bool]:
    """Return the number of threads that a ring started, and whether any runs after the ring is freed."""
    before = set(threading.enumerate())
    ring = GlooRing(dist.group.WORLD)
    ring.reduce_scatter(torch.empty(4), torch.ones(4 * dist.get_world_size())).wait()
    started = [t for t in threading.enumerate() if t not in before and t.name == "gloo ring"]
    del ring
    gc.collect()
    for thread in started:
        thread.join(60)
    return len(started), any(thread.is_alive() for thread in started)


def test_thread_of_a_freed_ring_ends(two: RankPool) -> None:
    assert two.run(threads_of_a_freed_ring) == [(1, False)] * 2
