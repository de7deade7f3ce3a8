"""Tests of process groups and transports: shared groups, NCCL communicators that gloo replaces, rings over nodes."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from torch import nn

import repro
from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel import transports
from repro.parallel.transports import GlooRing, GlooTransport, NcclTransport, needs_ring
from repro.wrap.parallelize import require_backend
from tests.pool import RankPool, forks
from tests.training import FEW, tiny, train


def train_on_the_cpu(group: str, port: int, rank: int) -> None:
    """Run a step of a rank from a launcher, with a module on the CPU of a machine with GPUs."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    torch.cuda.is_available = lambda: True
    if group == "group":
        dist.init_process_group("cpu:gloo")
    module = nn.Linear(2, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = repro.parallelize(module, optimizer, Layout(dp=2, zero=3))
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.cuda.is_initialized()
    dist.destroy_process_group()


def run_ranks(world: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(*arguments, rank)` in new processes, all of which must succeed."""
    ranks = [forks().Process(target=function, args=(*arguments, rank)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(250)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * world


@pytest.mark.parametrize("group", ["group", "none"])
def test_module_on_the_cpu_uses_gloo(group: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's
    run_ranks(2, train_on_the_cpu, group, store.port)


def make_meshes(folder: str, rank: int) -> None:
    """Make two meshes of one layout under each of two default groups, and count their process groups."""
    world = dist.distributed_c10d._world
    for start in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{start}", rank=rank, world_size=4)
        before = len(world.pg_map)
        for _ in range(2):
            mesh = meshes.distributed_mesh(Layout(tp=2, dp=2), "cpu")
            total = torch.ones(1)
            mesh.tp.all_reduce(total).wait()
            assert total.item() == 2
            assert len(world.pg_map) - before == 2, "one group of tp and one of dp"
        dist.destroy_process_group()


def test_meshes_share_the_process_groups_of_each_default_group(tmp_path: Path) -> None:
    """A process group occupies threads and sockets, or device memory, until the process ends."""
    run_ranks(4, make_meshes, str(tmp_path))


def test_each_channel_between_stages_has_its_own_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no tags. Activations (0) go to the next of three stages, gradients (1) to the previous stage."""
    monkeypatch.setattr(meshes, "make_process_group", lambda ranks, purpose: ranks)
    channels = meshes._channels((3, 5, 9), ring=True)
    neighbours = {(0, 1, 0): (3, 5), (1, 2, 0): (5, 9), (1, 0, 1): (5, 3), (2, 1, 1): (9, 5)}
    assert channels == {**neighbours, (2, 0, 0): (9, 3), (0, 2, 1): (3, 9)}
    assert meshes._channels((3, 5, 9), ring=False) == neighbours
    substitute = Mock(ReduceOp=dist.ReduceOp)
    substitute.get_rank.return_value = 1
    substitute.get_global_rank = lambda group, rank: (3, 5, 9)[rank]
    monkeypatch.setattr(transports, "dist", substitute)
    second, message = NcclTransport(None, channels), torch.ones(1)  # type: ignore[arg-type]
    for channel, (to, source) in enumerate(((2, 0), (0, 2))):
        second.send(message, to, channel)
        second.receive(message, source, channel)
    assert substitute.isend.mock_calls == [call(message, 9, group=(5, 9)), call(message, 3, group=(5, 3))]
    assert substitute.irecv.mock_calls == [call(message, 3, group=(3, 5)), call(message, 9, group=(9, 5))]


@pytest.mark.parametrize(
    ("backends", "device", "message"),
    [
        ("cpu:gloo,cuda:nccl", "cpu", ""),
        ("cpu:gloo,cuda:nccl", "cuda:0", ""),
        ("cuda:nccl", "cuda:0", ""),
        ("cpu:gloo,cuda:gloo", "cuda:0", r"on cuda\. Call init_process_group\(.nccl.\)"),
        ("cuda:nccl", "cpu", r"does not support a module on cpu\. Call init_process_group\(.gloo.\)"),
        ("cpu:gloo", "meta", "module: device type meta is not supported"),
    ],
)
def test_process_group_must_support_the_modules_device(backends: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        require_backend(backends, torch.device(device))


INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
LAYOUTS = [
    Layout(pp=4),
    Layout(pp=4, global_batch=4, **INTERLEAVED),
    Layout(pp=2, tp=2, global_batch=2, order="pp-dp-tp", **INTERLEAVED),
    Layout(pp=2, cp=2),
]


def connect(layouts: list[Layout]) -> list[list[Any]]:
    """Connect each layout twice; return bytes and ranks of used groups of the first call, and those of the second.

    In place of `non_torch_bytes`, each call returns one byte more.
    """
    found: list[list[Any]] = []
    uses: list[Sequence[int]] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, group: dist.ProcessGroup, **keys: Any) -> Any:
            uses.append(dist.get_process_group_ranks(group))
            return function(*arguments, group=group, **keys)

        return call

    with pytest.MonkeyPatch.context() as patch:
        calls = itertools.count(1)
        patch.setattr(meshes, "non_torch_bytes", lambda device: next(calls))
        for name in ("all_reduce", "isend", "irecv"):
            patch.setattr(dist, name, recorded(getattr(dist, name)))
        for layout in layouts:
            mesh = meshes.distributed_mesh(layout, "cuda")
            found.append([])
            for _ in range(2):
                uses.clear()
                found[-1] += [meshes.connect_communicators(mesh, torch.device("cpu")), list(uses)]
    return found


def test_every_communicator_is_connected_once_in_one_order(four: RankPool) -> None:
    by_rank = four.run(connect, LAYOUTS)
    for number, layout in enumerate(LAYOUTS):
        for rank in range(4):
            device_bytes, _, again, uses_again = by_rank[rank][number]
            assert uses_again == [], "a second call connects nothing"
            assert device_bytes.pop("start") >= 1
            assert {name: again[name] for name in device_bytes} == device_bytes
            assert set(device_bytes) <= {"world", "dp", "cp", "tp", "pp", "embedding", "channels"}
            ends = 2 if layout.chunks > 1 or 0 < layout.index_of("pp", rank) < layout.pp - 1 else 1
            assert device_bytes["channels"] == 2 * ends, "one byte to and from each neighbour"
        for pair in itertools.combinations(range(4), 2):
            one, other = ([use for use in by_rank[rank][number][1] if {*pair} <= {*use}] for rank in pair)
            assert one == other


def test_non_torch_bytes_are_used_minus_reserved_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Mock(**{"mem_get_info.return_value": (30, 100), "memory_reserved.return_value": 25})
    monkeypatch.setattr(torch, "cuda", cuda)
    assert meshes.non_torch_bytes(torch.device("cuda", 2)) == 45
    assert cuda.mock_calls[0] == call.synchronize(torch.device("cuda", 2)), (
        "running operations allocate memory"
    )
    assert {args for _, args, _ in cuda.mock_calls} == {(torch.device("cuda", 2),)}


def test_barrier_runs_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default is the GPU with the rank's number, which does not exist on a second node."""
    barrier, group = Mock(), Mock()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "barrier", barrier)
    NcclTransport(group).barrier()
    assert barrier.mock_calls == [call(group=group, device_ids=[3])]


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
