"""Tests of the reserved memory of the initialisation: buckets do not use freed blocks of temporaries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel.zero.flat_parameters import INITIALISED_ELEMENTS, InitialValues, Sharding, Tag
from repro.parallel.zero.partition import default_units
from repro.parallel.zero.stages import ShardedModule
from repro.simulate.memory.allocator import replay
from repro.simulate.memory.pools import round_up
from repro.simulate.trace.recorder import TraceRecorder

META = torch.device("meta")
WIDTH = 3200
"""Width of a layer whose parameters fill 20.5 MB in 16 bits, fewer than one temporary of 64-bit indices."""


def without_temporaries(index: int, start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, device=META)


def with_temporaries(index: int, start: int, stop: int) -> Tensor:
    """Return values after two temporaries of 64-bit integers, as the initialisation of a GPT on a device does."""
    indices = torch.empty(stop - start, dtype=torch.int64, device=META)
    words = indices.clone()
    return (words >> 40).float()


def reserved_bytes(layers: int, stage: int, values: InitialValues) -> int:
    """Return the reserved bytes after the initialisation of `layers` layers in 16 bits."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=META) for _ in range(layers)))
    sharding = Sharding.from_layout(Layout(zero=stage), meshes.single_rank_mesh().dp, META, torch.bfloat16)
    with TraceRecorder() as recorder:
        sharded = ShardedModule(module, default_units(module), sharding, lambda p: Tag(0), lambda _: values)
    assert len(sharded.buckets) == layers
    return replay(recorder.finish()).peak_reserved


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buckets_do_not_reuse_blocks_of_temporaries(stage: int) -> None:
    """The temporaries add their bytes once, for any number of buckets."""
    temporary_bytes = INITIALISED_ELEMENTS * (8 + 8 + 8 + 4)
    for layers in (4, 16):
        values = (with_temporaries, without_temporaries)
        more, fewer = (reserved_bytes(layers, stage, each) for each in values)
        assert fewer <= more <= fewer + round_up(temporary_bytes, 2 << 20)
