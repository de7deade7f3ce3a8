"""Resources of compiled kernels, their occupancy of a multiprocessor, and the memory bandwidth that they can request.

By Little's law, a memory of bandwidth B and latency L is busy while B L bytes are requested. A resident thread counts
with its smallest request: one access of one operand, or its part of a row. A share of 1 only excludes a lack of
threads.
"""

from __future__ import annotations

import re
from math import ceil
from typing import NamedTuple

from repro.kernels import layernorm
from repro.kernels.cuda.program import TYPE_BYTES, Program


class KernelResources(NamedTuple):
    """Resources of one kernel."""

    registers: int
    """32-bit registers per thread."""
    stack_bytes: int
    spilled_bytes: int
    """Bytes of stores and loads of spilled registers, per thread."""
    shared_bytes: int
    """Static shared memory per block."""


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Return the resources by kernel from the log of a compilation with `--ptxas-options=-v`."""
    found: dict[str, KernelResources] = {}
    name, stack, spilled = "", 0, 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spilled = int(frame[1]), int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = KernelResources(int(used[1]), stack, spilled, int(shared[1]) if shared else 0)
    return found


MICRO_BATCH_ROWS = 8192
"""Rows of a micro-batch: 8 samples of 1024 tokens, whose last wave of blocks is not full."""


class GpuLimits(NamedTuple):
    """Limits of a GPU of one compute capability.

    Source of `shared_bytes` and of the equal limits on registers, warps and blocks: CUDA C++ Programming Guide,
    "Technical Specifications per Compute Capability".
    """

    name: str
    shared_bytes: int
    """Maximum shared memory of a multiprocessor."""
    reserved_bytes: int
    """Additional shared memory per block."""
    processors: int
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    clock: float
    """Clock frequency in Hz."""
    source: str


LATENCY_CYCLES = 400.0
"""Latency of an idle memory in clock cycles, of V100, A100 and H100 (PMC10448217 Table 3); assumed for B200."""
GPUS = {
    70: GpuLimits(
        "V100", 96 * 1024, 0, 80, 900e9, 1.53e9, "PMC10448217 Table 3; 80 of 84 multiprocessors are enabled"
    ),
    80: GpuLimits(
        "A100 80 GB", 164 * 1024, 1024, 108, 2039e9, 1.41e9, "NVIDIA's A100 data sheet; PMC10448217 Table 3"
    ),
    90: GpuLimits("H100 SXM", 228 * 1024, 1024, 132, 3352e9, 1.755e9, "PMC10448217 Table 3; 132 are enabled"),
    100: GpuLimits(
        "B200", 228 * 1024, 1024, 148, 8000e9, 1.755e9, "NVIDIA's DGX B200 data sheet; the clock is H100's"
    ),
}
"""GPUs by compute capability times ten."""
MAX_REGISTERS, MAX_WARPS, MAX_BLOCKS = 65536, 64, 32


class Occupancy(NamedTuple):
    """Occupancy of a multiprocessor by one kernel."""

    blocks: int
    occupancy: float
    """Resident share of the warps, 0 to 1."""
    bandwidth: float
    """Minimum requested share of memory bandwidth, 0 to 1."""


def resident_blocks(used: KernelResources, threads: int, gpu: GpuLimits) -> int:
    """Return the resident blocks of `threads` threads on a multiprocessor."""
    warps = -(-threads // 32)
    of_warp = -(-used.registers * 32 // 256) * 256
    # A quarter of the multiprocessor holds the registers of its warps.
    by_registers = MAX_REGISTERS // 4 // of_warp * 4 // warps
    by_shared = gpu.shared_bytes // max(1, used.shared_bytes + gpu.reserved_bytes)
    return min(MAX_BLOCKS, MAX_WARPS // warps, by_registers, by_shared)


def requested_bytes(program: Program) -> int:
    """Return the minimum bytes that a thread requests before it waits."""
    known = dict(program.definitions)
    kind = str(known.get("TYPE", "float"))
    width = int(known.get("WIDTH", 16 // TYPE_BYTES[kind]))
    return width * TYPE_BYTES[kind] * int(known.get("ITEMS", 1))


def occupancy_of(program: Program, used: KernelResources, gpu: GpuLimits) -> Occupancy:
    """Return the occupancy of a multiprocessor and its request to memory, in the mean of all waves."""
    blocks = resident_blocks(used, program.threads, gpu)
    known, by_rows = dict(program.definitions), program.source in ("layernorm", "cross_entropy")
    if program.source == "layernorm" and known["BACKWARD"]:
        blocks = min(
            blocks, max(1, layernorm.MAX_BACKWARD_THREADS // program.threads)
        )  # the launch has no more
    in_flight = blocks * program.threads * requested_bytes(program)
    needed = gpu.bandwidth * LATENCY_CYCLES / gpu.clock / gpu.processors
    whole = MICRO_BATCH_ROWS / (blocks * gpu.processors) if by_rows and blocks else 1.0
    waves = whole / ceil(whole) if whole > 1 else 1.0
    return Occupancy(
        blocks, blocks * -(-program.threads // 32) / MAX_WARPS, min(1.0, in_flight / needed) * waves
    )
