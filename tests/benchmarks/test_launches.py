"""What a layer and micro-batch ask of a GPU, by family and set of operators: launches and allocations of each pass.

    make benchmarks

Counted on fake CUDA tensors; the seconds are those of counting, and no GPU's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.cases import audited, compiled, needs_compiler
from tests.fake_cuda.test_launches import CASES, of, of_layer

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("fake_cuda"))


@pytest.mark.parametrize("name", CASES)
def test_launches_and_allocations(benchmark: Any, runtime: Path, name: str) -> None:
    benchmark.group = "what a layer and micro-batch ask for"
    both = [of(name, layers) for layers in (1, 2)]
    found = benchmark.pedantic(audited, args=(runtime, both), rounds=1, iterations=1)
    launches, allocations = of_layer(found, *(each["name"] for each in both))
    for phase, kernels, times in zip(("forward", "backward"), launches, allocations, strict=True):
        benchmark.extra_info[phase] = {"launches": kernels.total(), "allocations": times, **kernels}
