"""Benchmark of the Python code in a call of each kernel: selection, binding and arguments; a fake driver does nothing.

`make bench-gpu` shows the time with the driver on a GPU. The backward of layer norm, GELU or dropout, and the gradient
norm, have two launches.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from repro.kernels.cuda import device
from tests.kernels.on_cpu import BINDINGS
from tests.kernels.test_cuda_dispatch import install
from tests.kernels.test_operators import samples

pytestmark = pytest.mark.benchmarks


@pytest.mark.parametrize("name", BINDINGS)
def test_kernel_call(benchmark: BenchmarkFixture, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.group = "launch"
    driver = install(monkeypatch)
    driver.keep = False
    call = device.cuda_dispatcher(name, BINDINGS[name], pytest.fail)
    arguments = samples(torch.bfloat16)[name]
    benchmark(call, *arguments)
