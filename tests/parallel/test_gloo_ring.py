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
from tests.training import FEW, tiny, train


def test_groups_with_several_ranks_on_several_nodes_use_rings() -> None:
    everyone, columns, rows = range(16), range(0, 16, 4), range(4, 8)
    assert needs_ring(everyone, 4)
    assert needs_ring((0, 1, 4), 4)
    assert not needs_ring(columns, 4), "one rank per node, so no ranks share a link"
    assert not needs_ring(rows, 4), "all ranks on one node"
    assert not needs_ring(everyone, 16), "one node"


def collectives(kind: type[GlooTransport]) -> tuple[list[float], list[float], Counter[int]]:
    """Return the results of a reduce-scatter and an all-gather, and the bytes that the first sent to each rank."""
    transport = kind(dist.group.WORLD)
    n, rank = transport.size, transport.rank
    part, gathered = torch.empty(6), torch.empty(n * 6)
    sent: Counter[int] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        send = dist.isend

        def isend(tensor: torch.Tensor, dst: int, **keys: Any) -> Any:
            sent[dst] += tensor.nbytes
            return send(tensor, dst, **keys)

        patch.setattr(dist, "isend", isend)
        transport.reduce_scatter(part, torch.arange(n * 6.0) * (rank + 1)).wait()
        scattered = Counter(sent)
        works = [transport.all_gather(into, part) for into in (gathered, torch.empty(n * 6))]
        for work in works:  # Concurrent gathers run in order.
            work.wait()
    return part.tolist(), gathered.tolist(), scattered


def test_ring_and_direct_messages_give_equal_results(four: RankPool) -> None:
    results = zip(four.run(collectives, GlooRing), four.run(collectives, GlooTransport), strict=True)
    for rank, ((*ring, ring_sent), (*direct, direct_sent)) in enumerate(results):
        assert ring == direct
        assert ring_sent.total() == direct_sent.total()
        assert list(ring_sent) == [(rank + 1) % 4]
        assert len(direct_sent) == 3


def sum_of_sixteen_bits() -> list[float]:
    """Return the sum of 256 of one rank and 1 of each other rank, in bf16."""
    part = torch.empty(1, dtype=torch.bfloat16)
    complete = torch.full((dist.get_world_size(),), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16)
    GlooTransport(dist.group.WORLD).reduce_scatter(part, complete).wait()
    return part.tolist()


def test_direct_messages_are_summed_in_fp32_and_rounded_once(four: RankPool) -> None:
    """256 + 1 rounds to 256 in bf16, but 259 rounds to 260."""
    assert four.run(sum_of_sixteen_bits) == [[260.0]] * 4


def train_on_nodes(ranks_per_node: str) -> tuple[list[float], str]:
    """Return the losses of four replicas, and the class of the transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", ranks_per_node)
        experiment = tiny(Layout(dp=4, zero=3), **FEW)
        transport = meshes.distributed_mesh(experiment.layout, "cpu").dp.transport
        return train(experiment).loss, type(transport).__name__


def test_losses_on_two_nodes_equal_those_on_one(four: RankPool) -> None:
    two_nodes, one_node = four.run(train_on_nodes, "2"), four.run(train_on_nodes, "4")
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
