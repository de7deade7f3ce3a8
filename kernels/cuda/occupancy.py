"""How many threads of a kernel a multiprocessor holds, by registers and shared memory, and if its memory needs more.

Little's law: a memory of bandwidth B and latency L is busy while B L bytes are asked for.  Of what each resident thread
asks for before it waits the least is counted: one access of one operand, or its part of a row that a block holds.
Latency is that of an idle memory.  So a part of 1 says that no lack of threads keeps a kernel from the bandwidth,
not that it gets there; one below 1, where it would be if it waited for each operand by itself.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from repro.kernels.cuda import layernorm
from repro.kernels.cuda.program import TYPES, Program
from repro.kernels.cuda.resources import Resources

BYTES = {name: dtype.itemsize for dtype, name in TYPES.items()}
"""Of an element, by its type in the sources."""
ROWS = 8192
"""Rows of a micro-batch: 8 samples of 1024 tokens.  The last wave of their blocks is not full."""


class Gpu(NamedTuple):
    """Of one compute capability.

    The CUDA C++ Programming Guide ("Technical Specifications per Compute Capability") has `shared_bytes`, and that
    registers (65,536), warps (64) and blocks (32) of a multiprocessor are the same on all four.
    """

    name: str
    shared_bytes: int
    """Of a multiprocessor, the largest part that its cache can give."""
    reserved_bytes: int
    """Shared memory that each block costs beyond its own."""
    processors: int
    bandwidth: float
    """Of memory, bytes/s."""
    clock: float
    """Hz."""
    source: str


LATENCY = 400.0
"""Clock cycles from an idle memory, of V100, A100 and H100: PMC10448217 Table 3.  For B200 taken over."""
GPUS = {
    70: Gpu(
        "V100", 96 * 1024, 0, 80, 900e9, 1.53e9, "PMC10448217 Table 3; 80 of 84 multiprocessors are enabled"
    ),
    80: Gpu(
        "A100 80 GB", 164 * 1024, 1024, 108, 2039e9, 1.41e9, "NVIDIA's A100 data sheet; PMC10448217 Table 3"
    ),
    90: Gpu("H100 SXM", 228 * 1024, 1024, 132, 3352e9, 1.755e9, "PMC10448217 Table 3; 132 are enabled"),
    100: Gpu(
        "B200", 228 * 1024, 1024, 148, 8000e9, 1.755e9, "NVIDIA's DGX B200 data sheet; the clock is H100's"
    ),
}
"""Compute capability times ten -> the GPU that it is known for."""
REGISTERS, WARPS, BLOCKS = 65536, 64, 32


class Filled(NamedTuple):
    """A multiprocessor full of one kernel."""

    blocks: int
    occupancy: float
    """Part of its warps that are there."""
    bandwidth: float
    """Part of the memory's bandwidth that they ask for at least, 0 to 1."""


def blocks_at_once(used: Resources, threads: int, gpu: Gpu) -> int:
    """Blocks of so many threads that a multiprocessor holds."""
    warps = -(-threads // 32)
    of_warp = -(-used.registers * 32 // 256) * 256
    # A warp's registers are in the quarter of the multiprocessor that runs it.
    by_registers = REGISTERS // 4 // of_warp * 4 // warps
    by_shared = gpu.shared_bytes // max(1, used.shared_bytes + gpu.reserved_bytes)
    return min(BLOCKS, WARPS // warps, by_registers, by_shared)


def asked_for(program: Program) -> int:
    """Bytes that a thread has asked for before it waits, at least."""
    known = dict(program.definitions)
    kind = str(known.get("TYPE", "float"))
    width = int(known.get("WIDTH", 16 // BYTES[kind]))
    return width * BYTES[kind] * int(known.get("ITEMS", 1))


def filled(program: Program, used: Resources, gpu: Gpu) -> Filled:
    """How full a multiprocessor is, and what that asks of memory in the mean of all waves."""
    blocks = blocks_at_once(used, program.threads, gpu)
    known, by_rows = dict(program.definitions), program.source in ("layernorm", "cross_entropy")
    if program.source == "layernorm" and known["BACKWARD"]:
        blocks = min(blocks, max(1, layernorm.THREADS_BACKWARD // program.threads))  # more are not launched
    in_flight = blocks * program.threads * asked_for(program)
    needed = gpu.bandwidth * LATENCY / gpu.clock / gpu.processors
    whole = ROWS / (blocks * gpu.processors) if by_rows and blocks else 1.0
    waves = whole / ceil(whole) if whole > 1 else 1.0
    return Filled(blocks, blocks * -(-program.threads // 32) / WARPS, min(1.0, in_flight / needed) * waves)
