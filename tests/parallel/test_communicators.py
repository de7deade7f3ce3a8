"""Tests that communicators are connected before the first step, in processes with gloo in place of NCCL."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel import transports
from tests.pool import RankPool

LAYOUTS = [
    Layout(pp=4),
    Layout(pp=4, schedule="interleaved", chunks=2, global_batch=4),
    Layout(pp=2, tp=2, schedule="interleaved", chunks=2, global_batch=2, order="pp-dp-tp"),
    Layout(pp=2, cp=2),
]


def connect(layouts: list[Layout]) -> list[tuple[Any, ...]]:
    """Connect each layout twice; return bytes and ranks of used groups of the first call, and those of the second.

    In place of `non_torch_bytes`, each call returns one byte more.
    """
    found = []
    with pytest.MonkeyPatch.context() as patch:
        calls = itertools.count(1)
        patch.setattr(meshes, "non_torch_bytes", lambda device: next(calls))
        uses: list[Sequence[int]] = []

        def recorded(name: str) -> Any:
            function = getattr(dist, name)

            def call(*arguments: Any, group: dist.ProcessGroup, **keys: Any) -> Any:
                uses.append(dist.get_process_group_ranks(group))
                return function(*arguments, group=group, **keys)

            return call

        for name in ("all_reduce", "isend", "irecv"):
            patch.setattr(transports.dist, name, recorded(name))
        for layout in layouts:
            mesh = meshes.distributed_mesh(layout, "cuda")
            results: list[Any] = []
            for _ in range(2):
                uses.clear()
                device_bytes = meshes.connect_communicators(mesh, torch.device("cpu"))
                results += [device_bytes, list(uses)]
            found.append(tuple(results))
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
    synchronized: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 25)
    device = torch.device("cuda", 2)
    assert meshes.non_torch_bytes(device) == 45
    assert synchronized == [device], "running operations allocate memory too"


def test_barrier_runs_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default is the GPU with the rank's number, which does not exist on a second node."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(transports.dist, "barrier", lambda **keys: calls.append(keys))
    group: Any = object()
    transports.NcclTransport(group).barrier()
    assert calls == [{"group": group, "device_ids": [3]}]
