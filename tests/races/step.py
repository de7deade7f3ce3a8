"""Steps of the native engine on one rank of a layout, with substitutes of the CUDA device and NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from repro.config import Experiment, Layout
from repro.config.enums import Category
from repro.engines.native.engine import NativeEngine
from repro.launch.rank.step_data import BatchLoader
from repro.measure.operators import without_compiler
from repro.model.data.stream import SyntheticStream
from repro.parallel import mesh as meshes
from repro.parallel import storage, transports
from repro.parallel.transports import NcclTransport, Transport
from repro.parallel.zero_r.activation_checkpointing import ActivationCheckpoints
from tests.races.device import Device, Stream, source_line


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
    """Substitute of `torch.distributed` with NCCL's order (torch's `ProcessGroupNCCL`): each group has one stream.

    A collective starts after the launched operations of the current stream, and `wait` orders the then current stream
    after the collective. Torch retains the operands of a running collective: until 2.7 by `record_stream`, since 2.8
    (earlier with `TORCH_NCCL_AVOID_RECORD_STREAMS=1`) by references. The substitute retains none, so `Work.hold` has to
    suffice.
    """

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


@dataclass
class Findings:
    """Races, waits and allocations in the steps of one rank."""

    races: list[str]
    waits: list[str]
    """Source lines that order streams or call `record_stream`."""
    host_waits: list[str]
    """Source lines at which the host waited for the device during the steps."""
    allocated: list[list[int]]
    """Bytes of each allocation, by step."""


class _Shapes(SyntheticStream):
    """Stream of samples without data."""

    def samples(self, first: int, count: int) -> Tensor:
        return torch.empty(count, self.seq + 1, dtype=torch.int64, device="meta")


def _page_locked(tensor: Tensor) -> Tensor:
    """Return page-locked memory, which the host writes without a stream."""
    return storage.mark(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), Category.HOST)


def run_steps(experiment: Experiment, *, stage: int = 0, ignored_line: str = "", steps: int = 2) -> Findings:
    """Run steps as the last tp, cp and dp rank of a stage. Waits at `ignored_line` have no effect."""
    layout = experiment.layout
    rank = _rank(layout, stage)
    device = Device()
    device.ignored_line = ignored_line
    with pytest.MonkeyPatch.context() as patch, without_compiler(), device:
        device.install(patch)
        patch.setattr(transports, "dist", FakeNccl(device))
        patch.setattr(ActivationCheckpoints, "_copy_stream", lambda self, x: Stream(device, "copies"))
        patch.setattr(BatchLoader, "_copy_stream", lambda self: Stream(device, "inputs"))
        patch.setattr(Tensor, "pin_memory", _page_locked)
        patch.setattr(
            meshes, "make_process_group", lambda pair, purpose: FakeGroup(f"channel {purpose}", pair, rank)
        )
        mesh = meshes.build_mesh(layout, rank, lambda ranks: _transport(layout, rank, ranks))
        engine = NativeEngine(experiment, mesh, torch.device("meta"))
        model = experiment.model
        inputs = BatchLoader(_Shapes(experiment.seq, model.vocab, 0), layout, rank, torch.device("meta"))
        device.host_waits.clear()
        allocated = []
        for step in range(steps):
            device.allocated = []
            engine.step(inputs.micro_batches(step), lambda phase: None)
            inputs.prefetch(step + 1)
            allocated.append(device.allocated)
        host_waits = list(device.host_waits)
        engine.synchronize()
        device.host_waits_for(device.current, "the end")
    for part in engine.parts:
        part.sharded.remove_hooks()
    return Findings([*device.storages.races], [*device.waits], host_waits, allocated)


def _rank(layout: Layout, stage: int) -> int:
    indices = {"tp": layout.tp - 1, "cp": layout.cp - 1, "dp": layout.dp - 1, "pp": stage}
    return sum(indices[axis] * stride for axis, stride in layout.strides.items())


def _transport(layout: Layout, rank: int, ranks: tuple[int, ...]) -> Transport:
    """Return a transport as of `repro.parallel.mesh.distributed_mesh`, with communicators of each pair of stages."""
    is_pipeline = layout.pp > 1 and ranks == layout.group_of("pp", rank)
    channels = meshes._channels(ranks, ring=layout.chunks > 1) if is_pipeline else {}
    name = next((axis for axis in ("tp", "cp", "dp", "pp") if ranks == layout.group_of(axis, rank)), "")
    return NcclTransport(FakeGroup(name or f"ranks {ranks}", ranks, rank), channels)  # type: ignore[arg-type]
