"""Benchmark of a ring all-reduce of sixteen ranks on an emulated network, and the time of its slowest link.

    make benchmarks PYTEST_ARGS=tests/benchmarks/test_rings.py

A row is an all-reduce with the given bytes per rank in each of its steps. The row's name has the time of the link
between two nodes for the payload. The difference is CPU time, mostly of frames and of segments that all ranks send at
the same time.
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
"""Network with the rates of a twin of tensor parallelism on four nodes of a slow machine."""
STEPS = 2 * (NETWORK.world - 1)
RANK_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from repro.util.processes import CoreAssignment

rank, world, size, rendezvous = *map(int, sys.argv[1:4]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world, init_method=rendezvous)
numbers = torch.zeros(world * size // 4)
dist.all_reduce(numbers)  # starts all threads
CoreAssignment(rank).apply()
print("ready", flush=True)
for _ in sys.stdin:
    dist.all_reduce(numbers)
    print("done", flush=True)
"""


def link_s(size: int) -> float:
    """Return the seconds of the slowest link, with `size` bytes per rank in each step."""
    return STEPS * size / (NETWORK.between * payload_share(NETWORK))


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(
    "size", [16_000, 48_000, 160_000], ids=lambda size: f"{size // 1000} kB, link {1e3 * link_s(size):.0f} ms"
)
def test_ring_all_reduce_and_its_slowest_link(benchmark: Any, size: int) -> None:
    benchmark.group = "all-reduce of 16 ranks on 4 nodes"
    with RunningNetwork(NETWORK) as network, ExitStack() as stack:
        rendezvous = f"tcp://{address(NETWORK, 0)}:29500"
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        options |= {"text": True, "cwd": ROOT, "env": {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}}
        pipes: list[tuple[IO[str], IO[str]]] = []
        for rank in range(NETWORK.world):
            command = [sys.executable, "-c", RANK_PROGRAM, *map(str, (rank, NETWORK.world, size, rendezvous))]
            process = stack.enter_context(subprocess.Popen(network.facts.command(rank, command), **options))
            assert process.stdin is not None
            assert process.stdout is not None
            pipes.append((process.stdin, process.stdout))

        def check_answers(expected: str) -> None:
            assert {stdout.readline() for _, stdout in pipes} == {f"{expected}\n"}

        def all_reduce() -> None:
            for stdin, _ in pipes:
                stdin.write("\n")
                stdin.flush()
            check_answers("done")

        check_answers("ready")
        benchmark.pedantic(all_reduce, rounds=8, warmup_rounds=1)
