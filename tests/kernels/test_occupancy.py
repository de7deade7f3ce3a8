"""How many blocks a multiprocessor holds, and the bandwidth that they ask for, on cases counted by hand."""

from __future__ import annotations

import pytest

from repro.kernels import gelu, layernorm
from repro.launch.doctor.kernels import GPUS, KernelResources, occupancy_of, requested_bytes, resident_blocks


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "architecture", "blocks"),
    [
        (32, 0, 1024, 80, 2),  # 64 warps
        (64, 0, 256, 70, 4),  # 64 x 256 is a quarter of 65,536
        (65, 0, 256, 70, 3),  # 65 x 32 is given as 2304: 7 warps in each quarter
        (128, 0, 512, 90, 1),
        (16, 0, 32, 90, 32),  # no more blocks than that
        (16, 48 * 1024, 128, 70, 2),
        (16, 48 * 1024, 128, 80, 3),  # of 164 KiB, and each costs one more
        (16, 0, 96, 100, 21),
    ],
)
def test_blocks(registers: int, shared: int, threads: int, architecture: int, blocks: int) -> None:
    assert resident_blocks(KernelResources(registers, 0, 0, shared), threads, GPUS[architecture]) == blocks


def test_bandwidth_by_littles_law() -> None:
    """Full of threads that read one half each, an H100 has asked for 2048 x 2 of the 5788 bytes that it takes."""
    used = KernelResources(32, 0, 0, 0)
    single, untouched = gelu.program("half", "half", 1), gelu.program("half", "half", 8)
    assert (requested_bytes(single), requested_bytes(untouched)) == (2, 16)
    needed = 3352e9 * 400 / 1.755e9 / 132
    assert occupancy_of(single, used, GPUS[90]).bandwidth == pytest.approx(4096 / needed)
    assert occupancy_of(untouched, used, GPUS[90]).bandwidth == 1.0
    assert occupancy_of(single, used, GPUS[90]).occupancy == 1.0


def test_the_last_wave_of_rows_is_not_full() -> None:
    """Backward of rows of 8192 by 512 threads: two blocks a multiprocessor are launched, for 8192 rows 160 at once."""
    backward = layernorm.program("half", "half", 8192, 8, True)
    assert (backward.threads, requested_bytes(backward)) == (512, 32)
    found = occupancy_of(backward, KernelResources(40, 0, 0, 0), GPUS[70])
    assert found.bandwidth == pytest.approx(8192 / 160 / 52)
