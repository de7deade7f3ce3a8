"""Tests of the process groups that a wrapped module uses, with and without a default group of the user."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import repro
from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel.transports import NcclTransport
from repro.wrap.parallelize import require_backend
from tests.pool import RankPool, forks


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


@pytest.mark.parametrize("group", ["group", "none"])
def test_module_on_the_cpu_uses_gloo(group: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's
    context = forks()
    ranks = [context.Process(target=train_on_the_cpu, args=(group, store.port, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(250)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]


GRID = Layout(tp=2, dp=2, micro_batch=1)


def new_groups(times: int) -> list[int]:
    """Return the number of additional process groups of this rank after each of `times` meshes of one layout."""
    world = dist.distributed_c10d._world
    before = len(world.pg_map)
    found = []
    for _ in range(times):
        mesh = meshes.distributed_mesh(GRID, "cpu")
        total = torch.ones(1)
        mesh.tp.all_reduce(total).wait()
        assert total.item() == 2
        found.append(len(world.pg_map) - before)
    return found


def test_experiments_of_a_process_share_process_groups(four: RankPool) -> None:
    """A process group occupies threads and sockets, or device memory, until the process ends."""
    for found in four.run(new_groups, 3):
        assert found in ([2, 2, 2], [0, 0, 0]), (
            "one group of tp and one of dp, or none if an earlier test created both"
        )


def start_twice(folder: str, rank: int) -> None:
    for start in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{start}", rank=rank, world_size=4)
        assert new_groups(2) == [2, 2]
        dist.destroy_process_group()


def test_each_default_group_has_separate_process_groups(tmp_path: Path) -> None:
    context = forks()
    ranks = [context.Process(target=start_twice, args=(str(tmp_path), rank)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(250)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * 4


def test_each_channel_between_stages_has_its_own_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no tags. Activations (0) go to the next of three stages, gradients (1) to the previous stage."""
    monkeypatch.setattr(meshes, "make_process_group", lambda ranks, purpose: ranks)
    channels = meshes._channels((3, 5, 9), ring=True)
    neighbours = {(0, 1, 0): (3, 5), (1, 2, 0): (5, 9), (1, 0, 1): (5, 3), (2, 1, 1): (9, 5)}
    assert channels == {**neighbours, (2, 0, 0): (9, 3), (0, 2, 1): (3, 9)}
    assert meshes._channels((3, 5, 9), ring=False) == neighbours
    sent: list[tuple[str, int, object]] = []

    def record(kind: str) -> Callable[..., object]:
        return lambda tensor, peer, group: sent.append((kind, peer, group)) or object()

    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: (3, 5, 9)[rank])
    monkeypatch.setattr(dist, "isend", record("send"))
    monkeypatch.setattr(dist, "irecv", record("receive"))
    second = NcclTransport(None, channels)  # type: ignore[arg-type]
    for channel, (to, source) in enumerate(((2, 0), (0, 2))):
        second.send(torch.ones(1), to, channel)
        second.receive(torch.ones(1), source, channel)
    assert sent == [
        *(("send", 9, (5, 9)), ("receive", 3, (3, 5))),
        *(("send", 3, (5, 3)), ("receive", 9, (9, 5))),
    ]


def test_process_group_must_support_the_device_of_the_module() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    require_backend("cpu:gloo,cuda:nccl", cpu)
    require_backend("cpu:gloo,cuda:nccl", cuda)
    require_backend("cuda:nccl", cuda)
    with pytest.raises(
        ValueError, match=r"does not support a module on cuda\. Call init_process_group\(.nccl.\)"
    ):
        require_backend("cpu:gloo,cuda:gloo", cuda)
    with pytest.raises(
        ValueError, match=r"does not support a module on cpu\. Call init_process_group\(.gloo.\)"
    ):
        require_backend("cuda:nccl", cpu)
    with pytest.raises(ValueError, match="module: device type meta is not supported"):
        require_backend("cpu:gloo", torch.device("meta"))
