"""Substitute of process groups with NCCL's order (torch's `ProcessGroupNCCL`): each group has one stream.

A collective starts after the launched operations of the current stream, and `wait` orders the then current stream after
the collective. Torch retains the operands of a running collective: until 2.7 by `record_stream`, since 2.8 (earlier
with `TORCH_NCCL_AVOID_RECORD_STREAMS=1`) by references. The substitute retains none, so `Work.hold` has to suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.races.device import Device, source_line


@dataclass(frozen=True)
class FakeGroup:
    """Process group of `ranks` on the global rank `rank`."""

    name: str
    ranks: tuple[int, ...]
    rank: int


@dataclass
class FakeWork:
    """Running collective or message."""

    device: Device
    moment: dict[str, int]

    def wait(self) -> bool:
        """Order the current stream after the collective or message."""
        if self.device.is_effective(source_line()):
            self.device.order.wait(self.device.current, self.moment)
        return True


class FakeNccl:
    """Substitute of the functions of `torch.distributed` that `repro.parallel.transports` calls on CUDA."""

    ReduceOp = dist.ReduceOp
    ProcessGroup, Work = dist.ProcessGroup, dist.Work

    def __init__(self, device: Device):
        self.device = device

    def get_rank(self, group: FakeGroup) -> int:
        return group.ranks.index(group.rank)

    def get_global_rank(self, group: FakeGroup, rank: int) -> int:
        return group.ranks[rank]

    def _launch(
        self, op: str, group: FakeGroup, reads: Sequence[Tensor], writes: Sequence[Tensor], async_op: bool
    ) -> FakeWork:
        device, call = self.device, f"{op} {source_line()}"
        device.order.wait(group.name, device.order.record(device.current))
        for tensors, is_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                device.access(tensor, group.name, writes=is_written, call=call)
        work = FakeWork(device, device.order.record(group.name))
        if not async_op:
            work.wait()
        return work

    def all_reduce(self, tensor: Tensor, op: Any, group: FakeGroup, async_op: bool = False) -> FakeWork:
        return self._launch("all_reduce", group, [tensor], [tensor], async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, group: FakeGroup, async_op: bool = False
    ) -> FakeWork:
        """Reduce and scatter; `output` may be a part of `input`."""
        return self._launch("reduce_scatter", group, [input], [output], async_op)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: FakeGroup, async_op: bool = False
    ) -> FakeWork:
        """Gather; `input` may be a part of `output`."""
        return self._launch("all_gather", group, [input], [output], async_op)

    def broadcast(self, tensor: Tensor, root: int, group: FakeGroup, async_op: bool = False) -> FakeWork:
        return self._launch("broadcast", group, [tensor], [tensor], async_op)

    def isend(self, tensor: Tensor, to: int, group: FakeGroup) -> FakeWork:
        """Send on the stream of the pair of ranks."""
        return self._launch("send", group, [tensor], [], True)

    def irecv(self, tensor: Tensor, source: int, group: FakeGroup) -> FakeWork:
        """Receive on the stream of the pair of ranks."""
        return self._launch("receive", group, [], [tensor], True)
