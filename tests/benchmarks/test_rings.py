"""A ring of sixteen ranks behind links of an emulated network, over what its slowest link takes alone.

    make benchmarks PYTEST_ARGS=tests/benchmarks/test_rings.py

A row is an all-reduce with so many bytes a rank in each of its steps, beside what the link between two nodes takes for
its payload.  What is more than that is the processors' part: frames, and a small segment of all ranks, which come at
once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import IO, Any

import pytest

from repro.config import EmulatedNetwork
from repro.emulate.links import address
from repro.emulate.network import RunningNetwork, payload_share
from tests.launch.runs import ROOT

NETWORK = EmulatedNetwork(nodes=4, ranks_per_node=4, between=6.3e6, within=7.8e6)
"""Of the rates that a twin of tensor parallelism over four nodes has on a slow machine."""
STEPS = 2 * (NETWORK.world - 1)
RANK = """
import sys
import torch
import torch.distributed as dist
from repro.util.processes import CoreAssignment

rank, world, size, place = *map(int, sys.argv[1:4]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world, init_method=place)
numbers = torch.zeros(world * size // 4)
dist.all_reduce(numbers)  # after which all threads are there
CoreAssignment(rank).apply()
print("ready", flush=True)
for _ in sys.stdin:
    dist.all_reduce(numbers)
    print("done", flush=True)
"""


def link_s(size: int) -> float:
    """Seconds of the slowest link, with `size` bytes a rank in each step."""
    return STEPS * size / (NETWORK.between * payload_share(NETWORK))


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(
    "size", [16_000, 48_000, 160_000], ids=lambda size: f"{size // 1000} kB, link {1e3 * link_s(size):.0f} ms"
)
def test_all_reduce(benchmark: Any, size: int) -> None:
    benchmark.group = "all-reduce of 16 ranks on 4 nodes"
    with RunningNetwork(NETWORK) as network, ExitStack() as stack:
        place = f"tcp://{address(NETWORK, 0)}:29500"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
        pipes: list[tuple[IO[str], IO[str]]] = []
        for rank in range(NETWORK.world):
            command = [sys.executable, "-c", RANK, *map(str, (rank, NETWORK.world, size, place))]
            process = subprocess.Popen(
                network.facts.command(rank, command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env=environment,
            )
            stack.enter_context(process)
            assert process.stdin is not None
            assert process.stdout is not None
            pipes.append((process.stdin, process.stdout))

        def answers(expected: str) -> None:
            assert {answer.readline() for _, answer in pipes} == {f"{expected}\n"}

        def all_reduce() -> None:
            for asked, _ in pipes:
                asked.write("\n")
                asked.flush()
            answers("done")

        answers("ready")
        benchmark.pedantic(all_reduce, rounds=8, warmup_rounds=1)
