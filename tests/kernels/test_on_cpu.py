"""Tests of the header that runs CUDA sources on the CPU: it reports errors that fail or hang on a GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from repro.kernels.cuda import program
from repro.kernels.cuda.program import Program
from tests.kernels.on_cpu import Host, placed

START = '#include "memory.cuh"\nstruct Arguments { float* x; };\nextern "C" __global__ void k(const Arguments a) {'


Build = Callable[[str], Callable[[torch.Tensor], None]]
"""Compile the body of a kernel, and return its launch for a tensor."""


@pytest.fixture
def build(session_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    monkeypatch.setattr(program, "SOURCES", tmp_path)

    def build_kernel(body: str) -> Callable[[torch.Tensor], None]:
        (tmp_path / "k.cu").write_text(START + body + "}")
        kernel = Program("k", (), struct.Struct("P"), ("k",), 64)
        loaded = session_host.load(kernel)
        return lambda x: loaded.launch("k", 2, kernel.arguments.pack(x.data_ptr()))

    return build_kernel


def test_threads_barriers_and_shuffles_work_in_either_order(build: Build, session_host: Host) -> None:
    run = build(
        """
        __shared__ float turned[64];
        turned[63 - threadIdx.x] = threadIdx.x;
        __syncthreads();
        float other = __shfl_xor_sync(0xffffffffu, turned[threadIdx.x], 1);
        a.x[blockIdx.x * 64 + threadIdx.x] = other + 100 * gridDim.x;
        """
    )
    expected = torch.tensor([63 - (i ^ 1) + 200.0 for i in range(64)]).repeat(2)
    for session_host.reversed in (False, True):
        x = torch.zeros(128)
        run(x)
        assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("if (threadIdx.x < 40) __syncthreads();", "barrier that not all threads reach"),
        ("if (threadIdx.x < 40) a.x[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 16);", "not all lanes"),
    ],
)
def test_divergent_barriers_and_shuffles_of_part_of_a_warp_are_errors(
    build: Build, body: str, error: str
) -> None:
    with pytest.raises(AssertionError, match=error):
        build(body)(torch.zeros(1))


def test_misaligned_accesses_are_errors(build: Build) -> None:
    run = build("float v[4]; load(v, a.x); a.x[0] = v[1];")
    run(placed(torch.zeros(8))[0])
    with pytest.raises(AssertionError, match="not aligned"):
        run(placed(torch.zeros(8), 1)[0])


@pytest.mark.parametrize("kind", ["half", "bfloat16"])
def test_rounding_is_that_of_torch(build: Build, kind: str) -> None:
    run = build(f"float& x = a.x[blockIdx.x * 64 + threadIdx.x]; x = widen(narrowed<{kind}>(x));")
    x = torch.cat([torch.randn(100) * 2.0 ** torch.randint(-26, 17, (100,)), torch.randn(20) * 65510])
    odd = [float("nan"), float("inf"), -0.0, 65519.9, 65520.0, 2.0**-25, 1.0 + 2.0**-11, 3.0 * 2.0**-25]
    x = torch.cat([x, torch.tensor(odd)])
    expected = x.to(torch.float16 if kind == "half" else torch.bfloat16).float()
    run(x)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
