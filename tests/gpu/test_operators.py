"""Tests of operators on CUDA tensors: shapes and values equal those of a CPU, and a CUDA graph can capture them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from repro.kernels.cuda import device
from tests.kernels.test_operators import NAMES, results_of, samples

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_shapes_equal_those_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    arguments = samples(dtype)[name]
    before = device.ran()
    results = results_of(name, tree_map_only(Tensor, lambda t: t.cuda(), arguments))
    assert set(device.ran() - before) == {(name, "cuda")}
    expected = results_of(name, tree_map_only(Tensor, torch.clone, arguments))
    for a, e in zip(results, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())
        torch.testing.assert_close(a.cpu(), e, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_operators_launch_on_the_current_stream_in_a_graph(name: str) -> None:
    """A launch on another stream would be missing in the graph or would make the capture fail."""
    arguments = tree_map_only(Tensor, lambda t: t.cuda(), samples(torch.float32)[name])
    start = tree_map_only(Tensor, torch.clone, arguments)

    def restore() -> None:
        for a, s in zip(tree_leaves(arguments), tree_leaves(start), strict=True):
            if isinstance(a, Tensor):
                a.copy_(s)

    expected = [t.clone() for t in results_of(name, arguments)]
    restore()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results_of(name, arguments)
    restore()
    graph.replay()
    torch.cuda.synchronize()
    for a, e in zip(captured, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6, equal_nan=True)
