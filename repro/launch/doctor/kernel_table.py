"""`repro doctor --kernels`: every kernel of every size class, as it is compiled for each GPU, without one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from repro.launch.doctor.kernels import asked
from repro.util.processes import usable_cores


@dataclass(frozen=True)
class KernelRow:
    """One kernel for one architecture."""

    kernel: str
    program: str
    """Source and what it was specialised for."""
    sizes: tuple[int, ...]
    """Columns of the rows that it is for; empty: rows of any length."""
    architecture: str
    threads: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    occupancy: float | None
    """Part of a multiprocessor's warps that are there, 0 to 1; None with `bandwidth`: the GPU is not described."""
    bandwidth: float | None
    """Part of the memory's bandwidth that its threads ask for at least, 0 to 1; how: `repro.kernels.cuda.occupancy`."""


def table(compile_for: str) -> list[KernelRow]:
    """Every kernel of every size class of all suites and model files, compiled for these architectures.

    Raises `ConfigError` where it is no architecture.  Nothing where there is no compiler; what does not compile is left
    out, and the families' checks say why.
    """
    from repro.kernels.cuda import cache, occupancy
    from repro.kernels.cuda import compile as compiler
    from repro.kernels.cuda.program import Unavailable
    from repro.kernels.cuda.resources import resources
    from repro.launch.doctor.sizes import size_classes

    try:
        capabilities = asked(compile_for, compiler.architectures())
        targets = [(occupancy.GPUS.get(a * 10 + b), compiler.target((a, b))) for a, b in capabilities]
    except Unavailable:
        return []
    todo = [(each, gpu, target) for each in size_classes() for gpu, target in targets]

    def rows(one: Any) -> list[KernelRow]:
        each, gpu, target = one
        try:
            log = cache.compiled(each.program, target).log
        except Unavailable:
            return []
        found = []
        for name, used in resources(log).items():
            fill = occupancy.filled(each.program, used, gpu) if gpu else None
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

    with ThreadPoolExecutor(usable_cores()) as pool:  # the compiler lets go of Python's lock
        return [row for found in pool.map(rows, todo) for row in found]
