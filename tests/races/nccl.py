"""Process groups without messages, each on a stream of its own, with NCCL's order (torch's ProcessGroupNCCL).

A collective starts after what the current stream has been given when it is issued; `wait` has the stream that is
current then go on after it.  Torch keeps its operands' memory meanwhile, until 2.7 by telling the allocator, since 2.8
(and before with `TORCH_NCCL_AVOID_RECORD_STREAMS=1`) what it reads by a reference.  Here it keeps nothing, so that what
is in order here is so under either rule: what the product holds (`Work.hold`) must do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from repro.parallel import transports
from tests.races.device import Device, line_of_product


@dataclass(frozen=True)
class FakeGroup:
    """A process group of `ranks` as one of them, `rank` (global), sees it."""

    name: str
    ranks: tuple[int, ...]
    rank: int


@dataclass
class FakeWork:
    """A collective under way."""

    device: Device
    moment: dict[str, int]

    def wait(self) -> bool:
        """Order the current stream after it."""
        if self.device.heeds(line_of_product()):
            self.device.order.waits(self.device.current, self.moment)
        return True


class FakeNccl:
    """`torch.distributed` as `repro.parallel.transports` uses it on CUDA."""

    ReduceOp = dist.ReduceOp
    ProcessGroup, Work = dist.ProcessGroup, dist.Work

    def __init__(self, device: Device):
        self.device = device

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for `torch.distributed` where collectives are issued."""
        patch.setattr(transports, "dist", self)

    def get_rank(self, group: FakeGroup) -> int:
        """Of this process within the group."""
        return group.ranks.index(group.rank)

    def get_global_rank(self, group: FakeGroup, rank: int) -> int:
        """Of the group's rank."""
        return group.ranks[rank]

    def _runs(
        self, op: str, group: FakeGroup, reads: Sequence[Tensor], writes: Sequence[Tensor], async_op: bool
    ) -> FakeWork:
        device, what = self.device, f"{op} {line_of_product()}"
        device.order.waits(group.name, device.order.reached(device.current))
        for tensor in reads:
            device.touch(tensor, group.name, writes=False, what=what)
        for tensor in writes:
            device.touch(tensor, group.name, writes=True, what=what)
        work = FakeWork(device, device.order.reached(group.name))
        if not async_op:
            work.wait()
        return work

    def all_reduce(self, tensor: Tensor, op: Any, group: FakeGroup, async_op: bool = False) -> FakeWork:
        """In place."""
        return self._runs("all_reduce", group, [tensor], [tensor], async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, group: FakeGroup, async_op: bool = False
    ) -> FakeWork:
        """`output` may be a part of `input`."""
        return self._runs("reduce_scatter", group, [input], [output], async_op)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: FakeGroup, async_op: bool = False
    ) -> FakeWork:
        """`input` may be a part of `output`."""
        return self._runs("all_gather", group, [input], [output], async_op)

    def broadcast(self, tensor: Tensor, root: int, group: FakeGroup, async_op: bool = False) -> FakeWork:
        """In place."""
        return self._runs("broadcast", group, [tensor], [tensor], async_op)

    def isend(self, tensor: Tensor, to: int, group: FakeGroup) -> FakeWork:
        """On the stream of the pair."""
        return self._runs("send", group, [tensor], [], True)

    def irecv(self, tensor: Tensor, source: int, group: FakeGroup) -> FakeWork:
        """On the stream of the pair."""
        return self._runs("receive", group, [], [tensor], True)
