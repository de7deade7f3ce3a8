"""A launcher that runs the CUDA sources on the CPU, and the CUDA bindings of all operators."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.kernels.cuda.program import SOURCES, Program
from repro.kernels.families import FAMILIES, FORMULAS

Binding = Callable[..., Any]
BINDINGS: dict[str, Binding] = {
    name: vars(family)[f"launch_{name}"]
    for name in FORMULAS
    for family in FAMILIES.values()
    if hasattr(family, f"launch_{name}")
}
"""Function that launches the kernels of an operator, by operator."""


@contextmanager
def registered_for_cpu(implementation_of: Callable[[str, Binding], Callable[..., Any]]) -> Iterator[None]:
    """Run `implementation_of(name, binding)` instead of torch's operators for tensors on the CPU."""
    library = torch.library.Library("repro", "IMPL")
    for name, binding in BINDINGS.items():
        library.impl(name, implementation_of(name, binding), "CPU", allow_override=True)
    yield
    library._destroy()


HEADER = Path(__file__).with_name("cuda_on_cpu.h")
COMPILER = shutil.which("g++")

_ENTRY = """
static Arguments of_{name};
extern "C" const char* on_cpu_{name}(int blocks, int reversed, const void* arguments) {{
  memcpy(&of_{name}, arguments, sizeof of_{name});
  return on_cpu::run(blocks, THREADS, reversed, [] {{ {name}(of_{name}); }});
}}
"""


class Host:
    """Launcher that represents a device with two multiprocessors."""

    processors = 2

    def __init__(self, folder: Path):
        self.folder = folder
        self.reversed = False
        """Whether the threads of a block run in decreasing order."""
        self.launched: list[str] = []
        self.headers = [HEADER]
        self.options: list[str] = []
        """Additional options of the compiler."""
        self._loaded: dict[Program, HostProgram] = {}

    @cached_property
    def header(self) -> Path:
        """Return the header of every source, precompiled because parsing takes longer than most sources."""
        path = self.folder / "headers.h"
        path.write_text("".join(f'#include "{header}"\n' for header in self.headers))
        self.compile(path, path.with_suffix(".h.gch"), "-xc++-header")
        return path

    def compile(self, source: Path, target: Path, *options: str) -> None:
        """Compile with the host's compiler; a precompiled header needs the same options in every call."""
        command = [COMPILER or "g++", "-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing"]
        command += ["-U_FORTIFY_SOURCE", *self.options, *options, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self, *arguments)

    def after_launch(self, library: ctypes.CDLL) -> None:
        """Do nothing after a launch; a subclass may read results from the library."""

    def load(self, program: Program) -> HostProgram:
        if program not in self._loaded:
            self._loaded[program] = HostProgram(self, program, self.folder / f"{len(self._loaded)}")
        return self._loaded[program]


class HostProgram:
    def __init__(self, host: Host, program: Program, path: Path):
        self.host = host
        entries = "".join(_ENTRY.format(name=name) for name in program.kernels)
        source, library = path.with_suffix(".cpp"), path.with_suffix(".so")
        source.write_text(f'#include "{host.header.name}"\n{program.text}\n{entries}')
        host.compile(source, library, "-shared", f"-I{SOURCES / 'cuda'}")
        self.library = ctypes.CDLL(str(library))

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        assert blocks > 0
        function = getattr(self.library, f"on_cpu_{kernel}")
        function.restype = ctypes.c_char_p
        error = function(blocks, int(self.host.reversed), arguments).decode()
        assert not error, f"{kernel}: {error}"
        self.host.launched.append(kernel)
        self.host.after_launch(self.library)


def placed(value: Tensor, offset: int = 0) -> tuple[Tensor, Callable[[], None]]:
    """Return a copy of a tensor at `offset` elements after a 16-byte boundary, and a check of the surrounding memory.

    The check fails if a kernel wrote before or after the copy.
    """
    margin = 32
    size = value.element_size()
    buffer = torch.full((value.numel() + 2 * margin,), 7.0).to(value.dtype)
    start = margin // 2 + (-(buffer.data_ptr() + margin // 2 * size) % 16) // size + offset
    copy = buffer[start : start + value.numel()].view(value.shape)
    copy.copy_(value)
    before, after = buffer[:start].clone(), buffer[start + value.numel() :].clone()

    def untouched() -> None:
        assert torch.equal(buffer[:start], before), "written before the tensor"
        assert torch.equal(buffer[start + value.numel() :], after), "written beyond the tensor"

    return copy, untouched
