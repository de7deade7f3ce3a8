"""Checks of the CUDA kernels: compiler, cache, families, and the resources of every compiled kernel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from repro.config.errors import ConfigError
from repro.launch.doctor import LIMITED, NO, YES, Check
from repro.util import units
from repro.util.extras import install_command
from repro.util.processes import usable_cores

ALL_ARCHITECTURES = (70, 80, 90, 100)
"""Architectures of `--kernels all`: V100, A100, H100 and B200."""
_FALLBACK_NOTE = "torch's operators run on a GPU, and every record says so"


def check_kernels(torch: Any, compile_for: str = "") -> list[Check]:
    """Check the operators, the compiler, the cache, and the families on the GPUs of this machine.

    `compile_for` (`sm_80`, a list with commas, or `all`): compile every family for these architectures, also without
    a GPU.  Raises `ConfigError` for an unknown architecture.
    """
    try:
        import repro.kernels
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # errors of an incompatible torch
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Check("kernels", NO, reason, "no training", fatal=True)]
    assert repro.kernels
    from repro.kernels.cuda.compile import COMPILER_PACKAGES
    from repro.kernels.cuda.program import Unavailable

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
    from repro.kernels.cuda.occupancy import parse_resources
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
    """Minimum requested share of memory bandwidth, 0 to 1 (`repro.kernels.cuda.occupancy`); None as above."""


def compile_kernel_rows(compile_for: str) -> list[KernelRow]:
    """Compile every kernel of every size class of all suites and model files, and return its resources.

    Programs that do not compile have no row; without a compiler there are no rows.  Raises `ConfigError` for an unknown
    architecture.
    """
    from repro.kernels.cuda import compile as compiler
    from repro.kernels.cuda import occupancy
    from repro.kernels.cuda.occupancy import parse_resources
    from repro.kernels.cuda.program import Unavailable
    from repro.kernels.families import size_classes

    try:
        capabilities = parse_architectures(compile_for, compiler.supported_architectures())
        targets = [(occupancy.GPUS.get(a * 10 + b), compiler.compile_target((a, b))) for a, b in capabilities]
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
            fill = occupancy.occupancy_of(each.program, used, gpu) if gpu else None
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
