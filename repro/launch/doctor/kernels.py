"""What `repro doctor` says of the CUDA kernels: compiler, cache, and how each family stands."""

from __future__ import annotations

from typing import Any

from repro.config.errors import ConfigError
from repro.launch.doctor.check import LIMITED, NO, YES, Check
from repro.util import units
from repro.util.extras import install_command

ARCHITECTURES = (70, 80, 90, 100)
"""V100, A100, H100 and B200: what `--kernels all` compiles for, as far as this NVRTC can."""
REFERENCE = "torch's operators run on a GPU, and every record says so"


def kernels(torch: Any, compile_for: str = "") -> list[Check]:
    """The operators, the compiler, the cache; and the families' state for the GPUs that are here.

    `compile_for` (`sm_80`, several with commas, `all`): compile every family for these, GPU or not.
    Raises `ConfigError` where it is no architecture.
    """
    try:
        import repro.kernels
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # what a foreign torch may do
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Check("kernels", NO, reason, "no training", fatal=True)]
    assert repro.kernels
    from repro.kernels.cuda.compile import PACKAGES
    from repro.kernels.cuda.program import Unavailable

    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("repro::")]
    text = f"{len(names)} operators, each with a form in torch"
    checks = [Check("kernels", YES, text, "the same step on CPU, CUDA and meta")]
    try:
        checks += _compiler(torch)
        checks += _families(torch, compile_for)
    except Unavailable as error:
        meaning = f"no CUDA kernel is compiled; {REFERENCE}"
        state = NO if torch.cuda.is_available() or compile_for else LIMITED
        found = f"{error}: {install_command(*PACKAGES)}"
        checks.append(Check("CUDA kernels", state, found, meaning))
    return checks


def _compiler(torch: Any) -> list[Check]:
    from repro.kernels.cuda import cache
    from repro.kernels.cuda import compile as compiler

    version, known = ".".join(map(str, compiler.version())), compiler.architectures()
    found = f"{version}, for sm_{known[0]} to sm_{known[-1]}"
    here = "when they are first called" if torch.cuda.is_available() else "where there is a GPU"
    compiles = Check("NVRTC", YES, found, f"compiles the CUDA kernels {here}; no toolkit is needed")
    count, size = cache.contents()
    held = f"{cache.folder()}: {count} programs, {units.size(size)}"
    return [
        compiles,
        Check("kernel cache", YES, held, f"compiled once for all ranks; ${cache.FOLDER} moves it"),
    ]


def _families(torch: Any, compile_for: str) -> list[Check]:
    from repro.kernels.cuda import compile as compiler
    from repro.kernels.cuda import families

    if compile_for:
        targets = [compiler.target(capability) for capability in asked(compile_for, compiler.architectures())]
    elif torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        targets = sorted({compiler.target((device.major, device.minor)) for device in devices})
    else:
        found = f"{len(families.FAMILIES)} families, no GPU to run them"
        meaning = "`repro doctor --kernels sm_80` compiles them for one that is not here"
        return [Check("CUDA kernels", LIMITED, found, meaning)]
    return [
        _family(name, family, target, compile=bool(compile_for))
        for target in targets
        for name, family in families.FAMILIES.items()
    ]


def asked(compile_for: str, known: tuple[int, ...]) -> list[tuple[int, int]]:
    """Compute capabilities; `all`: those of `ARCHITECTURES` that are `known`.  Raises `ConfigError`."""
    if compile_for == "all":
        return [divmod(architecture, 10) for architecture in ARCHITECTURES if architecture in known]
    found = []
    for word in compile_for.split(","):
        digits = word.strip().removeprefix("sm_").replace(".", "")
        if not digits.isdigit() or len(digits) < 2:
            right = "architectures such as sm_70, sm_80,sm_90 or 9.0, or all"
            raise ConfigError("--kernels", compile_for, right)
        found.append(divmod(int(digits), 10))
    return found


def _family(name: str, family: Any, target: Any, *, compile: bool) -> Check:
    """One family for one architecture: from the cache, or compiled now."""
    from repro.kernels.cuda import cache
    from repro.kernels.cuda.program import Unavailable
    from repro.kernels.cuda.resources import resources

    title, programs = f"{name} ({target.architecture})", family.examples()
    try:
        if compile:
            compiled = [cache.compiled(program, target) for program in programs]
        else:
            compiled = [kept for program in programs if (kept := cache.known(program, target))]
    except Unavailable as error:
        return Check(title, NO, f"failed: {error}", "torch's operators run in its place, and records say so")
    if not compiled:
        return Check(title, YES, "not compiled yet", "compiled when it is first called, in a second or less")
    used = [kernel for made in compiled for kernel in resources(made.log).values()]
    if not used:  # intermediate code, whose registers the driver assigns
        return Check(title, YES, "compiled for the driver", "runs on such a GPU")
    registers = max(kernel.registers for kernel in used)
    spilled = sum(kernel.spilled_bytes for kernel in used)
    spills = f"{spilled} bytes spilled" if spilled else "nothing spilled"
    found = f"compiled, {len(compiled)} of {len(programs)} usual programs, {registers} registers, {spills}"
    return Check(title, LIMITED if spilled else YES, found, "runs on such a GPU")
