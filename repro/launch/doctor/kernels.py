"""Checks of the CUDA kernels: compiler, cache, families, and the resources and occupancy of every compiled kernel.

By Little's law, a memory of bandwidth B and latency L is busy while B L bytes are requested. A resident thread counts
with its smallest request: one access of one operand, or its part of a row. A share of 1 only excludes a lack of
threads. Functions import the kernels, because `repro doctor` also runs where torch is missing.
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
"""Architectures of `--kernels all`: V100, A100, H100 and B200."""
_FALLBACK_NOTE = "torch's operators run on a GPU, and every record says so"

_RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.DOTALL,
)


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
    for name, *counts in _RESOURCES.findall(log):
        stack, stores, loads, registers, shared = (int(count or 0) for count in counts)
        found[name] = KernelResources(registers, stack, stores + loads, shared)
    return found


def check_kernels(torch: Any, compile_for: str = "") -> list[Check]:
    """Check the operators, the compiler, the cache, and the families on the GPUs of this machine.

    `compile_for` (`sm_80`, a list with commas, or `all`): compile every family for these architectures, also without
    a GPU.  Raises `ConfigError` for an unknown architecture.
    """
    try:
        from repro.kernels.cuda.compile import COMPILER_PACKAGES
        from repro.kernels.cuda.program import Unavailable
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # errors of an incompatible torch
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Check("kernels", NO, reason, "no training", fatal=True)]
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("repro::")]
    text = f"{len(names)} operators, each with a form in torch"
    checks = [Check("kernels", YES, text, "the same step on CPU, CUDA and meta")]
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
    found = f"{version}, for sm_{known[0]} to sm_{known[-1]}"
    here = "when they are first called" if torch.cuda.is_available() else "where there is a GPU"
    compiles = Check("NVRTC", YES, found, f"compiles the CUDA kernels {here}; no toolkit is needed")
    count, size = compiler.cache_contents()
    held = f"{compiler.cache_folder()}: {count} programs, {units.size(size)}"
    moves = f"compiled once for all ranks; ${compiler.CACHE_VARIABLE} moves it"
    return [compiles, Check("kernel cache", YES, held, moves)]


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
        found = f"{len(families.FAMILIES)} families, no GPU to run them"
        meaning = "`repro doctor --kernels sm_80` compiles them for one that is not here"
        return [Check("CUDA kernels", LIMITED, found, meaning)]
    return [
        _check_family(name, family, target, compile=bool(compile_for))
        for target in targets
        for name, family in families.FAMILIES.items()
    ]


def parse_architectures(compile_for: str, known: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return compute capabilities. `all` stands for the `known` ones of `ALL_ARCHITECTURES`.  Raises `ConfigError`."""
    if compile_for == "all":
        return [divmod(architecture, 10) for architecture in ALL_ARCHITECTURES if architecture in known]
    found = []
    for word in compile_for.split(","):
        digits = word.strip().removeprefix("sm_").replace(".", "")
        if not digits.isdigit() or len(digits) < 2:
            right = "architectures such as sm_70, sm_80,sm_90 or 9.0, or all"
            raise ConfigError("--kernels", compile_for, right)
        found.append(divmod(int(digits), 10))
    return found


def _check_family(name: str, family: Any, target: Any, *, compile: bool) -> Check:
    """Check one family for one architecture, from the cache or by compilation."""
    from repro.kernels.cuda import compile as compiler
    from repro.kernels.cuda.program import Unavailable

    title, programs = f"{name} ({target.architecture})", family.examples()
    try:
        if compile:
            compiled = [compiler.compile_cached(program, target) for program in programs]
        else:
            compiled = [kept for program in programs if (kept := compiler.cached_program(program, target))]
    except Unavailable as error:
        return Check(title, NO, f"failed: {error}", "torch's operators run in its place, and records say so")
    if not compiled:
        return Check(title, YES, "not compiled yet", "compiled when it is first called, in a second or less")
    used = [kernel for made in compiled for kernel in parse_resources(made.log).values()]
    if not used:  # the driver assigns the registers of intermediate code
        return Check(title, YES, "compiled for the driver", "runs on such a GPU")
    registers = max(kernel.registers for kernel in used)
    spilled = sum(kernel.spilled_bytes for kernel in used)
    spills = f"{spilled} bytes spilled" if spilled else "nothing spilled"
    found = f"compiled, {len(compiled)} of {len(programs)} usual programs, {registers} registers, {spills}"
    return Check(title, LIMITED if spilled else YES, found, "runs on such a GPU")


MICRO_BATCH_ROWS = 8192
"""Rows of a micro-batch: 8 samples of 1024 tokens, whose last wave of blocks is not full."""


class GpuLimits(NamedTuple):
    """Limits of a GPU of one compute capability.

    Source of `shared_bytes` and of the equal limits on registers, warps and blocks: CUDA C++ Programming Guide,
    "Technical Specifications per Compute Capability".
    """

    shared_bytes: int
    """Maximum shared memory of a multiprocessor."""
    reserved_bytes: int
    """Additional shared memory per block."""
    processors: int
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    clock: float
    """Clock frequency in Hz."""


LATENCY_CYCLES = 400.0
"""Latency of an idle memory in clock cycles, of V100, A100 and H100 (PMC10448217 Table 3); assumed for B200."""
GPUS = {
    # V100, A100 and H100: PMC10448217 Table 3. 80 of V100's 84 multiprocessors are enabled, and 132 on H100.
    70: GpuLimits(96 * 1024, 0, 80, 900e9, 1.53e9),
    # Bandwidth of the A100 with 80 GB: NVIDIA's data sheet.
    80: GpuLimits(164 * 1024, 1024, 108, 2039e9, 1.41e9),
    90: GpuLimits(228 * 1024, 1024, 132, 3352e9, 1.755e9),
    # B200: NVIDIA's DGX B200 data sheet. The clock is H100's.
    100: GpuLimits(228 * 1024, 1024, 148, 8000e9, 1.755e9),
}
"""GPUs by compute capability times ten."""
MAX_REGISTERS, MAX_WARPS, MAX_BLOCKS = 65536, 64, 32


class Occupancy(NamedTuple):
    """Occupancy of a multiprocessor by one kernel."""

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
    from repro.kernels.cuda.program import TYPE_BYTES

    known = dict(program.definitions)
    kind = str(known.get("TYPE", "float"))
    width = int(known.get("WIDTH", 16 // TYPE_BYTES[kind]))
    return width * TYPE_BYTES[kind] * int(known.get("ITEMS", 1))


def occupancy_of(program: Program, used: KernelResources, gpu: GpuLimits) -> Occupancy:
    """Return the occupancy of a multiprocessor and its request to memory, in the mean of all waves."""
    from repro.kernels.layernorm import MAX_BACKWARD_THREADS

    blocks = resident_blocks(used, program.threads, gpu)
    if program.source == "layernorm" and dict(program.definitions)["BACKWARD"]:
        blocks = min(blocks, max(1, MAX_BACKWARD_THREADS // program.threads))  # the launch has no more
    in_flight = blocks * program.threads * requested_bytes(program)
    needed = gpu.bandwidth * LATENCY_CYCLES / gpu.clock / gpu.processors
    waves = 1.0
    if program.source in ("layernorm", "cross_entropy") and blocks:
        waves = max(1.0, MICRO_BATCH_ROWS / (blocks * gpu.processors))
    occupancy = blocks * -(-program.threads // 32) / MAX_WARPS
    return Occupancy(occupancy, min(1.0, in_flight / needed) * waves / ceil(waves))


@dataclass(frozen=True)
class KernelRow:
    """Resources of one kernel on one architecture."""

    kernel: str
    program: str
    """Source and its definitions."""
    sizes: tuple[int, ...]
    """Numbers of columns of its rows; empty for rows of any length."""
    architecture: str
    threads: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    occupancy: float | None
    """Resident share of a multiprocessor's warps, 0 to 1; None for an undescribed GPU."""
    bandwidth: float | None
    """Minimum requested share of memory bandwidth, 0 to 1 by Little's law; None as above."""


def compile_kernel_rows(compile_for: str) -> list[KernelRow]:
    """Compile every kernel of every size class of all suites and model files, and return its resources.

    Programs that do not compile have no row; without a compiler there are no rows.  Raises `ConfigError` for an unknown
    architecture.
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

    with ThreadPoolExecutor(usable_cores()) as pool:  # the compiler releases Python's lock
        return [row for found in pool.map(rows, todo) for row in found]
