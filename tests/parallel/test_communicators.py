"""Communicators are connected before the first step, on real processes; gloo carries what NCCL would."""

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


class Growing:
    """A device of which every look finds one byte more in use."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, device: torch.device) -> int:
        self.looks += 1
        return self.looks


def connected(layouts: list[Layout]) -> list[dict[str, Any]]:
    """Of each layout what is found, and what this rank used of which ranks, in order."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "non_torch_bytes", Growing())
        uses: list[Use] = []

        def noted(name: str) -> Any:
            function = getattr(dist, name)

            def call(*arguments: Any, group: dist.ProcessGroup, **keys: Any) -> Any:
                uses.append((name, dist.get_process_group_ranks(group)))
                return function(*arguments, group=group, **keys)

            return call

        for name in ("all_reduce", "isend", "irecv"):
            patch.setattr(transports.dist, name, noted(name))
        for layout in layouts:
            mesh = meshes.distributed_mesh(layout, "cuda")
            uses.clear()
            taken = meshes.connect_communicators(mesh, torch.device("cpu"))
            first = list(uses)
            again = meshes.connect_communicators(mesh, torch.device("cpu"))
            found.append({"taken": taken, "uses": first, "again": (again, len(uses) - len(first))})
    return found


def test_every_communicator_is_used_once_in_one_order(four: RankPool) -> None:
    by_rank = four.run(connected, LAYOUTS)
    for number, layout in enumerate(LAYOUTS):
        ranks = [found[number] for found in by_rank]
        for rank, seen in enumerate(ranks):
            taken, (again, uses) = seen["taken"], seen["again"]
            assert taken.pop("start") >= 1
            assert uses == 0, "what is connected stays so"
            assert {name: again[name] for name in taken} == taken
            assert set(taken) <= {"world", "dp", "cp", "tp", "pp", "embedding", "channels"}
            stage, last = layout.index_of("pp", rank), layout.pp - 1
            ends = 2 if layout.chunks > 1 or 0 < stage < last else 1
            assert taken["channels"] == 2 * ends, "one byte each: to and from each neighbour"
        for a, b in itertools.combinations(range(4), 2):
            common = [
                [use for _, use in ranks[me]["uses"] if me in use and other in use]
                for me, other in ((a, b), (b, a))
            ]
            assert common[0] == common[1]


def test_what_torch_does_not_hold_is_the_drivers_less_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 25)
    device = torch.device("cuda", 2)
    assert meshes.non_torch_bytes(device) == 45
    assert asked == [device], "what is under way takes memory too"


def test_a_barrier_names_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would take the GPU of the rank's number, which on a second node is none."""
    message: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(transports.dist, "barrier", lambda **keys: message.append(keys))
    group: Any = object()
    transports.NcclTransport(group).barrier()
    assert message == [{"group": group, "device_ids": [3]}]
