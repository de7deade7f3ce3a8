"""Benchmark of launches and allocations of a layer and micro-batch, by model family and operator set.

    make benchmarks

Fake CUDA tensors give the counts. The measured time is the time to count, not the time of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.cases import audit, compile_runtime, needs_compiler
from tests.fake_cuda.test_launches import CASES, audit_case, layer_counts

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_runtime(tmp_path_factory.mktemp("fake_cuda"))


@pytest.mark.parametrize("name", CASES)
def test_launches_and_allocations(benchmark: Any, runtime: Path, name: str) -> None:
    benchmark.group = "launches and allocations of a layer and micro-batch"
    cases = [audit_case(name, layers) for layers in (1, 2)]
    found = benchmark.pedantic(audit, args=(runtime, cases), rounds=1, iterations=1)
    launches, allocations = layer_counts(found, *(each["name"] for each in cases))
    for phase, kernels, allocated in zip(("forward", "backward"), launches, allocations, strict=True):
        benchmark.extra_info[phase] = {"launches": kernels.total(), "allocations": allocated, **kernels}
