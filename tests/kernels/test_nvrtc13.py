"""Tests that every CUDA source compiles with NVRTC 13 for A100, H100 and B200, in a process without another NVRTC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.kernels import families

FOLDER = Path(sys.prefix) / "nvrtc13"
ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # or NVIDIA's bindings find the environment's own
from repro.kernels import families
from repro.kernels.cuda import compile as compiler
from repro.launch.doctor.kernels import parse_resources
found = {}
programs = {(program.source, program.kernels): program for program in reversed(families.example_programs())}
for program in programs.values():
    for architecture in (80, 90, 100):
        made = compiler.compile_cuda_program(program, compiler.CompileTarget(f"sm_{architecture}"))
        assert made.code.startswith(b"\\x7fELF")
        found[f"{program.name} sm_{architecture}"] = {
            name: [used.registers, used.spilled_bytes] for name, used in parse_resources(made.log).items()
        }
oldest = compiler.supported_architectures()[0]
print(json.dumps({"version": compiler.nvrtc_version(), "oldest": oldest, "found": found}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (FOLDER / ".installed").exists(),
    reason="NVRTC 13 is not installed: `make test-slow` installs it",
)
def test_every_source_compiles_without_spills() -> None:
    (library,) = FOLDER.glob("nvidia/*/lib/libnvrtc.so.13")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{FOLDER}:{ROOT}",
        "LD_LIBRARY_PATH": str(library.parent),
    }
    command = [sys.executable, "-c", PROGRAM, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document["version"][0] == 13
    assert document["oldest"] >= 75, "the last NVRTC for V100 is 12"
    kinds = {(program.source, program.kernels) for program in families.example_programs()}
    assert len(document["found"]) == 3 * len(kinds)
    for name, kernels in document["found"].items():
        assert kernels, name
        for kernel, (registers, spilled) in kernels.items():
            assert spilled == 0, f"{name}: {kernel}"
            assert registers <= 128, f"{name}: {kernel}"
