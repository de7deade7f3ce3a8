"""Tests of the bytes that CUDA sources access on the CPU, against the bytes of the cost formulas."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from repro.kernels import (
    adamw,
    column_sums,
    cost,
    cross_entropy,
    dropout,
    gelu,
    glu,
    layernorm,
    norm,
    rope,
    softmax,
)
from tests.kernels.on_cpu import COMPILER, HEADER, Host

ACCESS = np.dtype([("address", np.uint64), ("size", np.uint32), ("write", np.uint32)])
SANITIZER_OPTIONS = ["-fsanitize=kernel-address", "-fno-sanitize-address-use-after-scope"]
for _parameter in ("instrumentation-with-call-threshold", "stack", "globals"):
    SANITIZER_OPTIONS += ["--param", f"asan-{_parameter}=0"]


class CountingHost(Host):
    """Host whose programs log their memory accesses."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.headers = [HEADER, HEADER.with_name("counting.h")]
        self.options = SANITIZER_OPTIONS
        self.accesses: list[np.ndarray[Any, Any]] = []

    def after_launch(self, library: ctypes.CDLL) -> None:
        count = ctypes.c_size_t()
        library.counted.restype = ctypes.c_void_p
        address = library.counted(ctypes.byref(count))
        if count.value:
            raw = ctypes.string_at(address, count.value * ACCESS.itemsize)
            self.accesses.append(np.frombuffer(raw, ACCESS))

    def accessed_bytes(self, tensor: Tensor, *, write: bool) -> tuple[int, int]:
        """Return (bytes accessed at least once, bytes of all accesses) of a tensor."""
        found = np.concatenate(self.accesses)
        start, size = tensor.data_ptr(), tensor.nbytes
        found = found[
            (found["write"] == write) & (found["address"] >= start) & (found["address"] < start + size)
        ]
        times = np.zeros(size + 1, np.int64)
        first = (found["address"] - np.uint64(start)).astype(np.int64)
        np.add.at(times, first, 1)
        np.add.at(times, first + found["size"], -1)
        times = times.cumsum()[:-1]
        return int((times > 0).sum()), int(times.sum())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> CountingHost:
    if COMPILER is None:
        pytest.skip("needs g++ to run the CUDA sources on the CPU")
    return CountingHost(tmp_path_factory.mktemp("counting"))


def sixteen(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def wide(*shape: int) -> Tensor:
    return torch.rand(shape)


ROWS = (3, 40, 64)
SAMPLES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "layer_norm": (layernorm.launch_layer_norm, lambda: (sixteen(*ROWS), sixteen(64), sixteen(64), 1e-5)),
    "layer_norm_backward": (
        layernorm.launch_layer_norm_backward,
        lambda: (sixteen(*ROWS), sixteen(*ROWS), wide(3, 40, 1), wide(3, 40, 1), sixteen(64)),
    ),
    "rms_norm": (layernorm.launch_rms_norm, lambda: (sixteen(*ROWS), sixteen(64), 1e-5)),
    "rms_norm_backward": (
        layernorm.launch_rms_norm_backward,
        lambda: (sixteen(*ROWS), sixteen(*ROWS), wide(3, 40, 1), sixteen(64)),
    ),
    "swiglu": (glu.launch_swiglu, lambda: (sixteen(*ROWS),)),
    "swiglu_backward": (glu.launch_swiglu_backward, lambda: (sixteen(3, 40, 32), sixteen(*ROWS))),
    "rotary": (rope.launch_rotary, lambda: (sixteen(3, 40, 96), 2, 32, 16, 1e4, False)),
    "bias_gelu": (gelu.launch_bias_gelu, lambda: (sixteen(*ROWS), sixteen(64))),
    "bias_gelu_backward": (
        gelu.launch_bias_gelu_backward,
        lambda: (sixteen(*ROWS), sixteen(*ROWS), sixteen(64)),
    ),
    "bias_dropout_residual": (
        dropout.launch_bias_dropout_residual,
        lambda: (sixteen(*ROWS), sixteen(64), sixteen(*ROWS), 0.1, 7, 0, 40, 0),
    ),
    "bias_dropout_residual_backward": (
        dropout.launch_bias_dropout_residual_backward,
        lambda: (sixteen(*ROWS), True, 0.1, 7, 0, 40, 0),
    ),
    "causal_softmax": (softmax.launch_causal_softmax, lambda: (sixteen(2, 64, 64), 0.5)),
    "causal_softmax_backward": (
        softmax.launch_causal_softmax_backward,
        lambda: (sixteen(2, 64, 64), sixteen(2, 64, 64), 0.5),
    ),
    "cross_entropy_max": (cross_entropy.launch_cross_entropy_max, lambda: (sixteen(9, 531),)),
    "cross_entropy_sums": (
        cross_entropy.launch_cross_entropy_sums,
        lambda: (sixteen(9, 531), wide(9), torch.arange(9), 0),
    ),
    "cross_entropy_backward_": (
        cross_entropy.launch_cross_entropy_backward_,
        lambda: (sixteen(9, 531), wide(9), wide(2, 9) + 1, torch.arange(9), 0, wide(9)),
    ),
    "adamw_": (
        adamw.launch_adamw_,
        lambda: (
            *(
                [wide(8195), wide(7)],
                [sixteen(8195), sixteen(7)],
                [wide(8195), wide(7)],
                [wide(8195), wide(7)],
            ),
            [sixteen(8195), sixteen(7)],
            *(
                torch.tensor(1.0),
                torch.tensor(1e-3),
                0.9,
                0.95,
                1e-8,
                0.1,
                torch.tensor(2.0),
                torch.tensor(0.0),
            ),
        ),
    ),
    "norm_squared": (norm.launch_norm_squared, lambda: ([sixteen(16391), sixteen(5)],)),
    "sum_rows": (column_sums.launch_sum_rows, lambda: (sixteen(45, 64),)),
}
"""Binding of every operator, and a function that returns distinct operands."""


@pytest.mark.parametrize("name", SAMPLES)
def test_operands_are_read_once_and_results_written_once(name: str, host: CountingHost) -> None:
    binding, sample = SAMPLES[name]
    arguments = sample()
    host.accesses.clear()
    results = host.call(binding, *arguments)
    operands = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.dim()]
    written = {
        t.data_ptr(): t for t in [*operands, *tree_leaves(results)] if isinstance(t, Tensor) and t.nbytes
    }
    read = [host.accessed_bytes(t, write=False) for t in operands]
    wrote = [host.accessed_bytes(t, write=True) for t in written.values()]
    if name == "cross_entropy_backward_":  # the sanitizer reports a read with a write of one address once
        wrote[0] = (max(read[0][0], wrote[0][0]),) * 2
    price = cost(name, *arguments)
    assert sum(distinct for distinct, _ in wrote) == sum(total for _, total in wrote) == price.bytes_written
    if name.startswith("causal_softmax"):
        # The formula includes the masked scores of future positions, which this kernel does not read.
        assert 0.5 * price.bytes_read < sum(distinct for distinct, _ in read) < 0.6 * price.bytes_read
    else:
        assert sum(distinct for distinct, _ in read) == price.bytes_read
    largest = max(t.nbytes for t in operands)
    repeated = {"cross_entropy_sums": 9 * 2}.get(name, 0)  # the targets' logits
    for tensor, (distinct, total) in zip(operands, read, strict=True):
        if tensor.nbytes == largest:
            assert total - distinct == repeated, "a large operand is read from memory twice"


def test_all_operators_are_counted() -> None:
    from repro.kernels.families import FORMULAS

    assert set(SAMPLES) == set(FORMULAS)


def test_results_have_the_shapes_of_meta_functions(host: CountingHost) -> None:
    """Shapes, dtypes and strides of the bindings' results equal those of the meta functions."""
    for name, (binding, sample) in SAMPLES.items():
        arguments = sample()
        found = [t for t in tree_leaves(host.call(binding, *arguments)) if isinstance(t, Tensor)]
        meta = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), arguments)
        expected = tree_leaves(getattr(torch.ops.repro, name).default(*meta))
        for a, b in zip(found, [t for t in expected if isinstance(t, Tensor)], strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name
