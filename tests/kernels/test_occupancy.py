"""Tests of resident blocks per multiprocessor and of requested bandwidth, with cases computed by hand."""

from __future__ import annotations

import pytest

from repro.kernels import gelu, layernorm
from repro.launch.doctor.kernels import GPUS, KernelResources, occupancy_of, requested_bytes, resident_blocks


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "architecture", "blocks"),
    [
        (32, 0, 1024, 80, 2),  # 64 warps
        (64, 0, 256, 70, 4),  # 64 x 256 is a quarter of 65,536
        (65, 0, 256, 70, 3),  # 65 x 32 is rounded up to 2304: 7 warps in each quarter
        (128, 0, 512, 90, 1),
        (16, 0, 32, 90, 32),  # limit of blocks
        (16, 48 * 1024, 128, 70, 2),
        (16, 48 * 1024, 128, 80, 3),  # of 164 KiB; each block needs 1 KiB more
        (16, 0, 96, 100, 21),
    ],
)
def test_resident_blocks(registers: int, shared: int, threads: int, architecture: int, blocks: int) -> None:
    assert resident_blocks(KernelResources(registers, 0, 0, shared), threads, GPUS[architecture]) == blocks


def test_bandwidth_by_littles_law() -> None:
    """An H100 multiprocessor needs 5788 bytes in flight; 2048 threads that read one half each request 4096."""
    used = KernelResources(32, 0, 0, 0)
    single, vectorized = gelu.program("half", "half", 1), gelu.program("half", "half", 8)
    assert (requested_bytes(single), requested_bytes(vectorized)) == (2, 16)
    needed = 3352e9 * 400 / 1.755e9 / 132
    assert occupancy_of(single, used, GPUS[90]).bandwidth == pytest.approx(4096 / needed)
    assert occupancy_of(vectorized, used, GPUS[90]).bandwidth == 1.0
    assert occupancy_of(single, used, GPUS[90]).occupancy == 1.0


def test_bandwidth_includes_the_partial_last_wave() -> None:
    """Two blocks per multiprocessor of 512 threads process 160 of 8192 rows at once: 52 waves, the last one partial."""
    backward = layernorm.program("half", "half", 8192, 8, True)
    assert (backward.threads, requested_bytes(backward)) == (512, 32)
    found = occupancy_of(backward, KernelResources(40, 0, 0, 0), GPUS[70])
    assert found.bandwidth == pytest.approx(8192 / 160 / 52)
