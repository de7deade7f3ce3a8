"""Tests of one rank's messages and of its waits, with a transport that records them."""

from __future__ import annotations

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
from tests.parallel.test_buckets import EqualRanks

SHAPE = (2, 4, 8)
LIKE = torch.empty(0)


class RecordingTransport(EqualRanks):
    """Transport that records messages and collectives, and the waits for them."""

    def __init__(self) -> None:
        super().__init__(2)
        self.messages: list[tuple[str, int, int]] = []
        """Kind, peer and channel of each message."""
        self.sent: list[Tensor] = []

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        self.messages.append(("send", to, channel))
        self.sent.append(tensor)
        return self.start(tensor.numel())

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        self.messages.append(("receive", source, channel))
        return self.start(tensor.numel())


def make_boundary(
    *, split: bool = False, overlap: bool = True, rank: int = 0
) -> tuple[Boundary, RecordingTransport]:
    transport = RecordingTransport()
    pp = Group("pp", (0, 1), 0, transport, CommLedger())
    tp = Group("tp", (0, 1), rank, NoTransport(), CommLedger())
    return Boundary(pp, tp, SHAPE, LIKE, split=split, overlap=overlap), transport


def test_split_send_retains_only_a_copy_of_its_shard() -> None:
    """A view of 1/t of the tensor would retain the memory of the full tensor."""
    boundary, transport = make_boundary(split=True, rank=1)
    full = torch.arange(64.0).view(SHAPE)
    boundary.send(full, 1, FORWARD)
    (shard,) = transport.sent
    assert torch.equal(shard, full.view(-1)[32:])
    assert shard.untyped_storage().nbytes() == full.untyped_storage().nbytes() // 2


def test_third_send_of_a_kind_waits_for_the_first() -> None:
    boundary, transport = make_boundary()
    for _ in range(3):
        boundary.send(torch.zeros(SHAPE), 1, FORWARD)
    assert transport.waited == [0]
    boundary.send(torch.zeros(SHAPE), 1, BACKWARD)  # gradients have a separate limit
    assert transport.waited == [0]
    boundary.finish()
    assert transport.waited == [0, 1, 2, 3]


@pytest.mark.parametrize("overlap", [True, False])
def test_activations_and_gradients_use_separate_channels(overlap: bool) -> None:
    """An exchange without overlap transfers all pending messages and waits for them."""
    boundary, transport = make_boundary(overlap=overlap)
    for kind in (FORWARD, BACKWARD):
        boundary.send(torch.zeros(SHAPE), 1, kind)
        boundary.expect(1, kind)
    rows = {row["purpose"]: (row["calls"], row["payload_bytes"]) for row in boundary.pp.ledger.rows()}
    assert rows == {"activations": (1, 256), "gradients": (1, 256)}, "the sender counts, before the exchange"
    sends, receives = ([(kind, 1, channel) for channel in (0, 1)] for kind in ("send", "receive"))
    if overlap:
        assert transport.messages == [sends[0], receives[0], sends[1], receives[1]]
    else:
        assert transport.messages == []
        for _ in range(2):  # the second exchange has no messages
            boundary.exchange()
            assert transport.messages == [*receives, *sends]
            assert transport.waited == [2, 3, 0, 1], "sends before receives"
    assert [tuple(boundary.receive().shape) for _ in range(2)] == [SHAPE, SHAPE]


def test_only_pipelines_without_overlap_exchange() -> None:
    layouts = (Layout(pp=2), Layout(dp=2, overlap=False), Layout(pp=2, overlap=False))
    assert [exchanges(layout) for layout in layouts] == [False, False, True]


@pytest.mark.parametrize("overlaps", [True, False])
def test_tp_collectives_block_unless_they_overlap(overlaps: bool) -> None:
    transports: dict[tuple[int, ...], RecordingTransport] = {}
    layout = Layout(tp=2, dp=2, tp_overlap=overlaps)
    mesh = meshes.build_mesh(layout, 0, lambda ranks: transports.setdefault(ranks, RecordingTransport()))
    full, half = torch.zeros(4), torch.zeros(2)
    for group, blocks in ((mesh.tp, not overlaps), (mesh.dp, False)):
        transport = transports[group.ranks]
        works = [
            group.all_reduce(full),
            group.reduce_scatter(half, full),
            group.all_gather(full, half),
            group.on_channel(1).all_reduce(full),
        ]
        assert transport.waited == [0, 1, 2, 3] * blocks
        for work in works:
            work.wait()
        assert transport.waited == [0, 1, 2, 3], "a second wait does nothing"
