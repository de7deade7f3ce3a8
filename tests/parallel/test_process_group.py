"""The process group that a wrapped module uses, with and without one of the user's."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import repro
from repro.config import Layout
from repro.engines.wrap import require_backend
from tests.pool import forks


def train_on_the_cpu(group: str, port: int, rank: int) -> None:
    """A step of a rank that a launcher has started, on a machine with GPUs of which its module uses none."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank))
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
def test_a_module_on_the_cpu_uses_gloo(group: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    context = forks()
    ranks = [context.Process(target=train_on_the_cpu, args=(group, port, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def test_the_process_group_serves_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    require_backend("cpu:gloo,cuda:nccl", cpu)
    require_backend("cpu:gloo,cuda:nccl", cuda)
    require_backend("cuda:nccl", cuda)
    with pytest.raises(ValueError, match="lacks cuda:nccl for a module on cuda"):
        require_backend("cpu:gloo,cuda:gloo", cuda)
    with pytest.raises(ValueError, match="lacks cpu:gloo for a module on cpu"):
        require_backend("cuda:nccl", cpu)
    with pytest.raises(ValueError, match="module: on meta"):
        require_backend("cpu:gloo", torch.device("meta"))
