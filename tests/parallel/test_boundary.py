"""What one rank does with its messages and when it waits for them, seen through a transport that only takes notes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel.comm import Group
from repro.parallel.ledger import CommLedger
from repro.parallel.pipeline.boundary import Boundary, exchanges
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD
from repro.parallel.transports import NoTransport, Work

SHAPE = (2, 4, 8)
LIKE = torch.empty(0)


class Notes(NoTransport):
    """Which messages were sent, and which of them were waited for."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.wires: list[tuple[int, int]] = []
        """To or from whom, on which channel."""
        self.waited: list[int | str] = []

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        number = len(self.sent)
        self.sent.append(tensor)
        self.wires.append((to, channel))
        return Work(finish=lambda: self.waited.append(number))

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        self.wires.append((source, channel))
        return Work(finish=lambda: self.waited.append("received"))

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        return Work(finish=lambda: self.waited.append(0))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        return self.all_reduce(input, "")

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return self.all_reduce(input, "")


def boundary(*, split: bool = False, overlap: bool = True, rank: int = 0) -> tuple[Boundary, Notes]:
    notes = Notes()
    pp = Group("pp", (0, 1), 0, notes, CommLedger())
    tp = Group("tp", (0, 1), rank, NoTransport(), CommLedger())
    return Boundary(pp, tp, SHAPE, LIKE, split=split, overlap=overlap), notes


def test_of_a_split_message_only_the_part_that_is_sent_is_held() -> None:
    """Until it has arrived, 1/t of the tensor: not a view, which would keep all of it."""
    wires, notes = boundary(split=True, rank=1)
    full = torch.arange(64.0).view(SHAPE)
    wires.send(full, 1, FORWARD)
    (part,) = notes.sent
    assert torch.equal(part, full.view(-1)[32:])
    assert part.untyped_storage().nbytes() == full.untyped_storage().nbytes() // 2


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "send"])
def test_what_is_read_is_held_until_it_is_waited_for(op: str) -> None:
    group = Group("dp", (0, 1), 0, Notes(), CommLedger())
    read = torch.zeros({"all_gather": 2}.get(op, 4))
    gone = weakref.ref(read)
    more = {
        "reduce_scatter": (torch.zeros(2), read),
        "all_gather": (torch.zeros(4), read),
        "send": (read, 1, 0),
    }
    work = getattr(group, op)(*more.pop(op, (read,)))
    group.transport.sent.clear()  # type: ignore[attr-defined]
    more.clear()
    del read
    assert gone() is not None
    work.wait()
    assert gone() is None


def test_two_messages_of_a_kind_are_under_way_and_the_oldest_is_waited_for() -> None:
    wires, notes = boundary()
    for _ in range(3):
        wires.send(torch.zeros(SHAPE), 1, FORWARD)
    assert notes.waited == [0]
    wires.send(torch.zeros(SHAPE), 1, BACKWARD)  # another stream
    assert notes.waited == [0]
    wires.finish()
    assert notes.waited == [0, 1, 2, 3]


def test_activations_and_gradients_are_two_streams() -> None:
    wires, notes = boundary()
    for kind in (FORWARD, BACKWARD, FORWARD):
        wires.send(torch.zeros(SHAPE), 1, kind)
        wires.expect(1, kind)
    assert notes.wires == [(1, 0), (1, 0), (1, 1), (1, 1), (1, 0), (1, 0)]
    rows = {row["purpose"]: (row["calls"], row["payload_bytes"]) for row in wires.pp.ledger.rows()}
    assert rows == {"activations": (2, 2 * 256), "gradients": (1, 256)}, "their sender counts them"


def test_without_overlap_messages_wait_for_their_batch_and_it_for_all_of_them() -> None:
    wires, notes = boundary(overlap=False)
    for kind in (FORWARD, BACKWARD):
        wires.send(torch.zeros(SHAPE), 1, kind)
        wires.expect(1, kind)
    counted = {row["purpose"]: row["calls"] for row in wires.pp.ledger.rows()}
    assert counted == {"activations": 1, "gradients": 1}, "where they are made"
    assert notes.wires == []
    wires.exchange()
    assert notes.wires == [(1, 0), (1, 1), (1, 0), (1, 1)], "both are awaited before either is sent"
    assert notes.waited == [0, 1, "received", "received"]
    wires.exchange()
    assert len(notes.wires) == 4
    assert [tuple(wires.receive().shape) for _ in range(2)] == [SHAPE, SHAPE]
    assert not exchanges(Layout(pp=2))
    assert not exchanges(Layout(dp=2, overlap=False))
    assert exchanges(Layout(pp=2, overlap=False))


@pytest.mark.parametrize("overlaps", [True, False])
def test_collectives_of_tensor_parallelism_are_waited_for_where_they_begin_unless_they_overlap(
    overlaps: bool,
) -> None:
    transports: dict[tuple[int, ...], Notes] = {}
    layout = Layout(tp=2, dp=2, tp_overlap=overlaps)
    mesh = meshes.build_mesh(layout, 0, lambda ranks: transports.setdefault(ranks, Notes()))
    full, half = torch.zeros(4), torch.zeros(2)
    for group, blocks in ((mesh.tp, not overlaps), (mesh.dp, False)):
        notes = transports[group.ranks]
        works = [
            group.all_reduce(full),
            group.reduce_scatter(half, full),
            group.all_gather(full, half),
            group.on_channel(1).all_reduce(full),
        ]
        assert notes.waited == [0] * len(works) * blocks
        for work in works:
            work.wait()
        assert len(notes.waited) == len(works), "a second wait does nothing"
