"""Tests of CUDA sources on the CPU: the header reports errors that fail or hang on a GPU, and a step trains."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.kernels.cuda import device, program
from repro.kernels.cuda.program import Program
from tests.kernels.on_cpu import BINDINGS, Binding, Host, placed, registered_for_cpu
from tests.parallel.test_architectures import FAMILIES
from tests.training import TINY, tiny, train

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


SMALL = replace(TINY, name="two", layers=2)
SCORES = {"causal_softmax", "causal_softmax_backward"}
"""Operators that only the operator set `softmax` calls."""
GPT2 = {"layer_norm", "layer_norm_backward", "bias_gelu", "bias_gelu_backward"}
LLAMA = {"rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotary"}


@pytest.fixture
def sources(session_host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the CUDA bindings for tensors on the CPU; a fallback is an error."""
    session_host.reversed = False
    monkeypatch.setattr(device, "_ran", Counter())
    monkeypatch.setattr(device, "_reported_reasons", set())
    monkeypatch.setattr(device, "cuda_launcher", lambda index: session_host)

    def dispatched(name: str, binding: Binding) -> Callable[..., Any]:
        return device.cuda_dispatcher(name, binding, lambda *_: pytest.fail("torch's operators ran"))

    with registered_for_cpu(dispatched):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "kernels", "layer"),
    [("fp16", "fused", GPT2), ("bf16", "softmax", GPT2), ("bf16", "fused", LLAMA)],
    ids=["fp16", "bf16-softmax", "bf16-llama"],
)
def test_cuda_sources_train_like_torch_operators(
    precision: str, kernels: str, layer: set[str], request: pytest.FixtureRequest
) -> None:
    """The steps have loss scaling, clipping, dropout and recomputation; losses agree within a few roundings."""
    layout = Layout(micro_batch=2, global_batch=4, precision=precision, kernels=kernels, recompute=True)
    dropouts = {"dropout": 0.1, "attention_dropout": 0.1 if kernels == "softmax" else 0.0}
    model = SMALL if layer is GPT2 else FAMILIES["llama"]
    experiment = tiny(layout, model, steps=4, **dropouts)
    expected = train(experiment)
    request.getfixturevalue("sources")
    found = train(experiment)
    ran = device.ran()
    others = (GPT2 | LLAMA) - layer | (SCORES if kernels == "fused" else set())
    # Sums over rows of a CPU tensor are computed by torch.
    assert {name for name, _ in ran} == set(BINDINGS) - others - {"sum_rows"}
    assert {how for _, how in ran} == {"cuda"}
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    torch.testing.assert_close(found.loss, expected.loss, rtol=4 * unit, atol=0.0)
    torch.testing.assert_close(found.norm, expected.norm, rtol=40 * unit, atol=0.0)
