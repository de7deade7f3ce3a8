"""The layout's ranks as torch's DeviceMesh, with the axes (pp, dp, tp) whatever the order of their neighbours is."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from repro.config import Layout

AXES = ("pp", "dp", "tp")


def device_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    """The mesh of all ranks, made once of every shape and order; None in a process that communicates with nobody."""
    if layout.world == 1:
        return None
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    strides = tuple(layout.strides[axis] for axis in AXES)
    return _made(dist.group.WORLD, device_type, sizes, strides)


@cache
def _made(
    world: dist.ProcessGroup, device_type: str, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> DeviceMesh:
    # A mesh makes process groups, which are not given back: experiments of one launch share them.
    del world
    ranks = torch.arange(dist.get_world_size()).as_strided(sizes, strides)
    return DeviceMesh(device_type, ranks.contiguous(), mesh_dim_names=AXES)
