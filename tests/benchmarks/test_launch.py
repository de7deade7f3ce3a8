"""Microseconds of our own Python for a call of each kernel: choice, binding, arguments; the driver does nothing.

On a GPU the driver's own time comes on top; `make bench-gpu` shows both together.  A backward pass of layer norm, GELU
or dropout, and the norm, are two launches.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from repro.kernels.cuda import device
from tests.kernels.bindings import BINDINGS
from tests.kernels.fake_driver import install
from tests.kernels.test_operators import samples

pytestmark = pytest.mark.benchmarks


@pytest.mark.parametrize("name", BINDINGS)
def test_call(benchmark: BenchmarkFixture, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.group = "launch"
    driver = install(monkeypatch)
    driver.keep = False
    call = device.cuda_dispatcher(name, BINDINGS[name], pytest.fail)
    arguments = samples(torch.bfloat16)[name]
    benchmark(call, *arguments)
