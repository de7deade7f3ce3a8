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
    Layout(pp=2, dp=2, global_batch=2),
    Layout(pp=2, tp=2, schedule="interleaved", chunks=2, global_batch=2, order="pp-dp-tp"),
    Layout(pp=2, cp=2),
]
Use = tuple[str, Sequence[int]]


class GrowingBytes:
    """Substitute of `non_torch_bytes`; each call returns one byte more."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, device: torch.device) -> int:
        self.calls += 1
        return self.calls


def connect(layouts: list[Layout]) -> list[dict[str, Any]]:
    """Connect each layout twice; return the communicators' bytes and this rank's operations with their ranks."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "non_torch_bytes", GrowingBytes())
        uses: list[Use] = []

        def recorded(name: str) -> Any:
            function = getattr(dist, name)

            def call(*arguments: Any, group: dist.ProcessGroup, **keys: Any) -> Any:
                uses.append((name, dist.get_process_group_ranks(group)))
                return function(*arguments, group=group, **keys)

            return call

        for name in ("all_reduce", "isend", "irecv"):
            patch.setattr(transports.dist, name, recorded(name))
        for layout in layouts:
            mesh = meshes.distributed_mesh(layout, "cuda")
            uses.clear()
            device_bytes = meshes.connect_communicators(mesh, torch.device("cpu"))
            first = list(uses)
            again = meshes.connect_communicators(mesh, torch.device("cpu"))
            found.append({"bytes": device_bytes, "uses": first, "again": (again, len(uses) - len(first))})
    return found


def test_every_communicator_is_connected_once_in_one_order(four: RankPool) -> None:
    by_rank = four.run(connect, LAYOUTS)
    for number, layout in enumerate(LAYOUTS):
        ranks = [found[number] for found in by_rank]
        for rank, seen in enumerate(ranks):
            device_bytes, (again, uses) = seen["bytes"], seen["again"]
            assert device_bytes.pop("start") >= 1
            assert uses == 0, "a second call connects nothing"
            assert {name: again[name] for name in device_bytes} == device_bytes
            assert set(device_bytes) <= {"world", "dp", "cp", "tp", "pp", "embedding", "channels"}
            stage, last = layout.index_of("pp", rank), layout.pp - 1
            ends = 2 if layout.chunks > 1 or 0 < stage < last else 1
            assert device_bytes["channels"] == 2 * ends, "one byte to and from each neighbour"
        for a, b in itertools.combinations(range(4), 2):
            common = [
                [use for _, use in ranks[own]["uses"] if own in use and other in use]
                for own, other in ((a, b), (b, a))
            ]
            assert common[0] == common[1]


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
