"""Checks of the CUDA kernels: compiler, cache, compilation, and the resources and occupancy of every compiled kernel.

By Little's law, a memory of bandwidth B and latency L is busy only while B x L bytes are in flight. The
estimated bytes in flight are a lower bound, because each resident thread is assumed to make its smallest request.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.config.errors import ConfigError
from repro.launch.doctor import LIMITED, NO, YES, Check
from repro.util import units
from repro.util.extras import install_command
from repro.util.processes import usable_cores

if TYPE_CHECKING:
    from repro.kernels.cuda.program import Program

ALL_ARCHITECTURES = (70, 80, 90, 100)
"""GPU architectures (10 x compute capability) that `repro doctor --kernels all` selects: V100, A100, H100, B200."""
_FALLBACK_NOTE = (
    "training uses torch's operators in place of CUDA kernels, and every record names the replaced kernels"
)

_RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.DOTALL,
)


class KernelResources(NamedTuple):
    """Registers and memory of one compiled CUDA kernel."""

    registers: int
    """Number of 32-bit registers per thread."""
    stack_bytes: int
    spilled_bytes: int
    """Bytes per thread that are stored to and loaded from local memory because registers spill."""
    shared_bytes: int
    """Static shared memory of a thread block, in bytes."""


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Return the registers and memory of each CUDA kernel in a compiler log of `--ptxas-options=-v`."""
    found: dict[str, KernelResources] = {}
    for name, *counts in _RESOURCES.findall(log):
        stack, stores, loads, registers, shared = (int(count or 0) for count in counts)
        found[name] = KernelResources(registers, stack, stores + loads, shared)
    return found


def check_kernels(torch: Any, compile_for: str = "") -> list[Check]:
    """Check torch operators, CUDA compiler, kernel cache, and each kernel family (such as softmax) on this machine.

    `compile_for`: GPU architectures for which every family is compiled, even on a machine without GPU: `sm_80`, a list
    with commas, or `all`. Empty: check this machine's GPUs.  Raises `ConfigError` for an unknown architecture.
    """
    try:
        from repro.kernels.cuda.compile import COMPILER_PACKAGES
        from repro.kernels.cuda.program import Unavailable
    # An incompatible torch raises one of these exceptions while the kernels are imported.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Check("kernels", NO, reason, "no training", fatal=True)]
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("repro::")]
    text = f"{len(names)} operators, each with a reference implementation in PyTorch"
    checks = [Check("kernels", YES, text, "the kernels run training steps on CPU, CUDA and meta devices")]
    try:
        checks += _check_compiler(torch)
        checks += _check_families(torch, compile_for)
    except Unavailable as error:
        meaning = f"no CUDA kernel is compiled; {_FALLBACK_NOTE}"
        state = NO if torch.cuda.is_available() or compile_for else LIMITED
        found = f"{error}: {install_command(*COMPILER_PACKAGES)}"
        checks.append(Check("CUDA kernels", state, found, meaning))
    return checks


def _check_compiler(torch: Any) -> list[Check]:
    from repro.kernels.cuda import compile as compiler

    version, known = ".".join(map(str, compiler.nvrtc_version())), compiler.supported_architectures()
    found = f"version {version} compiles for GPU architectures sm_{known[0]} to sm_{known[-1]}"
    meaning = "compiles each CUDA kernel at its first call, without a CUDA toolkit"
    if not torch.cuda.is_available():
        meaning = "compiles the CUDA kernels on machines with a GPU, without a CUDA toolkit"
    compiles = Check("NVRTC", YES, found, meaning)
    count, size = compiler.cache_contents()
    contents = f"{compiler.cache_folder()}: {count} programs, {units.size(size)}"
    moves = f"kernels are compiled once for all ranks; ${compiler.CACHE_VARIABLE} sets another cache folder"
    return [compiles, Check("kernel cache", YES, contents, moves)]


def _check_families(torch: Any, compile_for: str) -> list[Check]:
    from repro.kernels import families
    from repro.kernels.cuda import compile as compiler

    if compile_for:
        capabilities = parse_architectures(compile_for, compiler.supported_architectures())
        targets = list(map(compiler.compile_target, capabilities))
    elif torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        targets = sorted({compiler.compile_target((device.major, device.minor)) for device in devices})
    else:
        found = f"{len(families.FAMILIES)} kernel families, but no GPU to run them"
        meaning = "`repro doctor --kernels sm_80` compiles the kernels for an A100 without a GPU"
        return [Check("CUDA kernels", LIMITED, found, meaning)]
    return [
        _check_family(name, family, target, compile=bool(compile_for))
        for target in targets
        for name, family in families.FAMILIES.items()
    ]


def parse_architectures(compile_for: str, known: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the compute capabilities (major, minor) of the GPU architectures that `compile_for` names.

    `all` selects the `ALL_ARCHITECTURES` that the compiler supports (`known`). Other text raises `ConfigError`.
    """
    if compile_for == "all":
        return [divmod(architecture, 10) for architecture in ALL_ARCHITECTURES if architecture in known]
    found = []
    for word in compile_for.split(","):
        digits = word.strip().removeprefix("sm_").replace(".", "")
        if not digits.isdigit() or len(digits) < 2:
            right = "all, or GPU architectures separated by commas, for example sm_70 or sm_80,9.0"
            raise ConfigError("--kernels", compile_for, right)
        found.append(divmod(int(digits), 10))
    return found


def _check_family(name: str, family: Any, target: Any, *, compile: bool) -> Check:
    """Check one kernel family, such as softmax, on a GPU type: compile its programs, or use cached ones."""
    from repro.kernels.cuda import compile as compiler
    from repro.kernels.cuda.program import Unavailable

    title, programs = f"{name} ({target.architecture})", family.examples()
    try:
        if compile:
            compiled = [compiler.compile_cached(program, target) for program in programs]
        else:
            compiled = [entry for program in programs if (entry := compiler.cached_program(program, target))]
    except Unavailable as error:
        return Check(title, NO, f"failed: {error}", _FALLBACK_NOTE)
    if not compiled:
        return Check(title, YES, "not compiled yet", "the first call compiles the kernel in a second or less")
    used = [kernel for made in compiled for kernel in parse_resources(made.log).values()]
    if not used:  # The log of a compilation to PTX lists no registers, because the driver assigns registers.
        found = "compiled to PTX, which the driver translates to machine code"
        return Check(title, YES, found, "the compiled kernels run on GPUs of this architecture")
    registers = max(kernel.registers for kernel in used)
    spilled = sum(kernel.spilled_bytes for kernel in used)
    spills = f"{spilled} bytes spilled" if spilled else "no registers spilled"
    count = f"compiled {len(compiled)} of {len(programs)} CUDA programs of common sizes"
    found = f"{count}: up to {registers} registers per thread, {spills}"
    return Check(
        title, LIMITED if spilled else YES, found, "the compiled kernels run on GPUs of this architecture"
    )


MICRO_BATCH_ROWS = 8192
"""Number of tokens (tensor rows) of the micro-batch that `repro doctor` assumes for kernel occupancy: 8 x 1024."""


class GpuLimits(NamedTuple):
    """Hardware limits of a GPU of one compute capability.

    Source of `shared_bytes`, `MAX_REGISTERS`, `MAX_WARPS` and `MAX_BLOCKS`: CUDA C++ Programming Guide, "Technical
    Specifications per Compute Capability".
    """

    shared_bytes: int
    """Maximum shared memory of a multiprocessor, in bytes."""
    reserved_bytes: int
    """Shared memory that CUDA reserves in each thread block, in bytes."""
    processors: int
    """Number of multiprocessors."""
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    clock: float
    """Clock frequency in Hz."""


LATENCY_CYCLES = 400.0
"""Latency of device memory without load, in clock cycles (V100, A100, H100: PMC10448217 Table 3; B200: assumed)."""
GPUS = {
    # Source of V100, A100 and H100 limits: PMC10448217 Table 3. V100 has 80 enabled multiprocessors, H100 132.
    70: GpuLimits(96 * 1024, 0, 80, 900e9, 1.53e9),
    # Source of the bandwidth of the A100 with 80 GB: NVIDIA's data sheet.
    80: GpuLimits(164 * 1024, 1024, 108, 2039e9, 1.41e9),
    90: GpuLimits(228 * 1024, 1024, 132, 3352e9, 1.755e9),
    # Source of the B200's limits: NVIDIA's DGX B200 data sheet. The clock is assumed to be that of the H100.
    100: GpuLimits(228 * 1024, 1024, 148, 8000e9, 1.755e9),
}
"""Hardware limits of GPUs, by compute capability times ten."""
MAX_REGISTERS, MAX_WARPS, MAX_BLOCKS = 65536, 64, 32


class Occupancy(NamedTuple):
    """Occupancy of a GPU's multiprocessor by one kernel, and the memory bandwidth that its threads request."""

    occupancy: float
    """Number of resident warps divided by the maximum of a multiprocessor, 0 to 1."""
    bandwidth: float
    """Lower bound of the share of memory bandwidth that the resident threads of a kernel request, 0 to 1."""


def resident_blocks(used: KernelResources, threads: int, gpu: GpuLimits) -> int:
    """Return how many blocks of a kernel, with `threads` threads each, run on one multiprocessor at the same time."""
    warps = -(-threads // 32)
    of_warp = -(-used.registers * 32 // 256) * 256
    # Each quarter of a multiprocessor has its own register file, so a warp cannot use registers of two quarters.
    by_registers = MAX_REGISTERS // 4 // of_warp * 4 // warps
    by_shared = gpu.shared_bytes // max(1, used.shared_bytes + gpu.reserved_bytes)
    return min(MAX_BLOCKS, MAX_WARPS // warps, by_registers, by_shared)


def requested_bytes(program: Program) -> int:
    """Return the minimum bytes that a thread of a CUDA program requests from memory before it waits for the data."""
    from repro.kernels.cuda.program import TYPE_BYTES

    known = dict(program.definitions)
    kind = str(known.get("TYPE", "float"))
    width = int(known.get("WIDTH", 16 // TYPE_BYTES[kind]))
    return width * TYPE_BYTES[kind] * int(known.get("ITEMS", 1))


def occupancy_of(program: Program, used: KernelResources, gpu: GpuLimits) -> Occupancy:
    """Return a kernel's occupancy, and its requested share of memory bandwidth as a mean of all thread block waves."""
    from repro.kernels.layernorm import MAX_BACKWARD_THREADS

    blocks = resident_blocks(used, program.threads, gpu)
    if program.source == "layernorm" and dict(program.definitions)["BACKWARD"]:
        # The backward kernel of a norm is launched with at most `MAX_BACKWARD_THREADS` threads per multiprocessor.
        blocks = min(blocks, max(1, MAX_BACKWARD_THREADS // program.threads))
    in_flight = blocks * program.threads * requested_bytes(program)
    needed = gpu.bandwidth * LATENCY_CYCLES / gpu.clock / gpu.processors
    waves = 1.0
    if program.source in ("layernorm", "cross_entropy") and blocks:
        waves = max(1.0, MICRO_BATCH_ROWS / (blocks * gpu.processors))
    occupancy = blocks * -(-program.threads // 32) / MAX_WARPS
    return Occupancy(occupancy, min(1.0, in_flight / needed) * waves / ceil(waves))


@dataclass(frozen=True)
class KernelRow:
    """Registers, memory and occupancy of one CUDA kernel on one GPU architecture."""

    kernel: str
    program: str
    """Text that identifies the compiled program: name of the CUDA source, and macro definitions."""
    sizes: tuple[int, ...]
    """Lengths of tensor rows (elements) for which the CUDA program is compiled; empty for a program for any length."""
    architecture: str
    threads: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    occupancy: float | None
    """Number of resident warps divided by the maximum of a multiprocessor, 0 to 1; None for a GPU not in `GPUS`."""
    bandwidth: float | None
    """Lower bound of the share of memory bandwidth that the kernel requests, 0 to 1; None for a GPU not in `GPUS`."""


def compile_kernel_rows(compile_for: str) -> list[KernelRow]:
    """Compile the CUDA kernels for the tensor sizes of packaged suites and models; return one table row per kernel.

    Programs that do not compile are omitted.  Raises `ConfigError` for an unknown architecture.
    """
    from repro.kernels.cuda import compile as compiler
    from repro.kernels.cuda.program import Unavailable
    from repro.kernels.families import size_classes

    try:
        capabilities = parse_architectures(compile_for, compiler.supported_architectures())
        targets = [(GPUS.get(a * 10 + b), compiler.compile_target((a, b))) for a, b in capabilities]
    except Unavailable:
        return []
    todo = [(each, gpu, target) for each in size_classes() for gpu, target in targets]

    def rows(one: Any) -> list[KernelRow]:
        each, gpu, target = one
        try:
            log = compiler.compile_cached(each.program, target).log
        except Unavailable:
            return []
        found = []
        for name, used in parse_resources(log).items():
            fill = occupancy_of(each.program, used, gpu) if gpu else None
            found.append(
                KernelRow(
                    kernel=name,
                    program=each.program.name,
                    sizes=each.sizes,
                    architecture=target.architecture,
                    threads=each.program.threads,
                    registers=used.registers,
                    shared_bytes=used.shared_bytes,
                    spilled_bytes=used.spilled_bytes,
                    occupancy=fill and fill.occupancy,
                    bandwidth=fill and fill.bandwidth,
                )
            )
        return found

    # Compilations run in parallel in threads, because the CUDA compiler releases Python's global interpreter lock.
    with ThreadPoolExecutor(usable_cores()) as pool:
        return [row for found in pool.map(rows, todo) for row in found]
