"""The native engine's step on a device of streams without data: what one rank of a layout does, whole and for real."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from repro.config import Experiment, Layout
from repro.config.enums import Category
from repro.engines.native.engine import NativeEngine
from repro.launch.rank.step_data import BatchLoader
from repro.measure.operators import without_compiler
from repro.model.data.stream import SyntheticStream
from repro.parallel import mesh as meshes
from repro.parallel import storage
from repro.parallel.transports import NcclTransport, Transport
from repro.parallel.zero_r.activation_checkpointing import ActivationCheckpoints
from tests.races.device import Device, Stream
from tests.races.nccl import FakeGroup, FakeNccl


@dataclass
class Seen:
    """What one rank's steps showed."""

    races: list[str]
    waits: list[str]
    """The lines of the product that order streams, or tell the allocator."""
    host_waits: list[str]
    """Where the host waited for the device, from the first step's start to the last one's end."""
    allocated: list[list[int]]
    """Bytes of every allocation of each step."""


class _Shapes(SyntheticStream):
    """Samples without data."""

    def samples(self, first: int, count: int) -> Tensor:
        return torch.empty(count, self.seq + 1, dtype=torch.int64, device="meta")


def _page_locked(made: Tensor) -> Tensor:
    """What the host makes it writes itself, on no stream."""
    return storage.mark(torch.empty(made.shape, dtype=made.dtype, device="meta"), Category.HOST)


def run(
    experiment: Experiment,
    *,
    stage: int = 0,
    dropped: str = "",
    steps: int = 2,
) -> Seen:
    """Take steps as the last tp and dp rank of a stage.  `dropped`: a line whose waits do nothing."""
    layout = experiment.layout
    rank = _rank(layout, stage)
    device = Device()
    device.dropped = dropped
    with pytest.MonkeyPatch.context() as patch, without_compiler(), device:
        device.install(patch)
        FakeNccl(device).install(patch)
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
    return Seen([*map(str, device.storages.races)], [*device.waits], host_waits, allocated)


def _rank(layout: Layout, stage: int) -> int:
    place = {"tp": layout.tp - 1, "cp": layout.cp - 1, "dp": layout.dp - 1, "pp": stage}
    return sum(place[axis] * stride for axis, stride in layout.strides.items())


def _transport(layout: Layout, rank: int, ranks: tuple[int, ...]) -> Transport:
    """Return the transport of `repro.parallel.mesh.distributed_mesh`: communicators for each pair of stages."""
    piped = layout.pp > 1 and ranks == layout.group_of("pp", rank)
    channels = meshes._channels(ranks, ring=layout.chunks > 1) if piped else {}
    name = next((axis for axis in ("tp", "cp", "dp", "pp") if ranks == layout.group_of(axis, rank)), "")
    return NcclTransport(FakeGroup(name or f"ranks {ranks}", ranks, rank), channels)  # type: ignore[arg-type]
