"""Tests of the cost formulas: by hand, and against the bytes that the CUDA sources access on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from repro.kernels import cost
from repro.kernels.library import Cost
from tests.kernels.bindings import BINDINGS
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
SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "layer_norm": lambda: (sixteen(*ROWS), sixteen(64), sixteen(64), 1e-5),
    "layer_norm_backward": lambda: (
        *(sixteen(*ROWS), sixteen(*ROWS), wide(3, 40, 1), wide(3, 40, 1), sixteen(64)),
    ),
    "rms_norm": lambda: (sixteen(*ROWS), sixteen(64), 1e-5),
    "rms_norm_backward": lambda: (sixteen(*ROWS), sixteen(*ROWS), wide(3, 40, 1), sixteen(64)),
    "swiglu": lambda: (sixteen(*ROWS),),
    "swiglu_backward": lambda: (sixteen(3, 40, 32), sixteen(*ROWS)),
    "rotary": lambda: (sixteen(3, 40, 96), 2, 32, 16, 1e4, False),
    "bias_gelu": lambda: (sixteen(*ROWS), sixteen(64)),
    "bias_gelu_backward": lambda: (sixteen(*ROWS), sixteen(*ROWS), sixteen(64)),
    "bias_dropout_residual": lambda: (sixteen(*ROWS), sixteen(64), sixteen(*ROWS), 0.1, 7, 0, 40, 0),
    "bias_dropout_residual_backward": lambda: (sixteen(*ROWS), True, 0.1, 7, 0, 40, 0),
    "causal_softmax": lambda: (sixteen(2, 64, 64), 0.5),
    "causal_softmax_backward": lambda: (sixteen(2, 64, 64), sixteen(2, 64, 64), 0.5),
    "cross_entropy_max": lambda: (sixteen(9, 531),),
    "cross_entropy_sums": lambda: (sixteen(9, 531), wide(9), torch.arange(9), 0),
    "cross_entropy_backward_": lambda: (
        *(sixteen(9, 531), wide(9), wide(2, 9) + 1, torch.arange(9), 0, wide(9)),
    ),
    "adamw_": lambda: (
        *([make(8195), make(7)] for make in (wide, sixteen, wide, wide, sixteen)),
        *(torch.tensor(1.0), torch.tensor(1e-3), 0.9, 0.95, 1e-8, 0.1, torch.tensor(2.0), torch.tensor(0.0)),
    ),
    "norm_squared": lambda: ([sixteen(16391), sixteen(5)],),
    "sum_rows": lambda: (sixteen(45, 64),),
}
"""Function that returns distinct operands, by operator."""


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", BINDINGS)
def test_operands_are_read_once_and_results_written_once(name: str, host: CountingHost) -> None:
    """The results also have the shapes, dtypes and strides of the meta function."""
    arguments = SAMPLES[name]()
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), arguments)
    host.accesses.clear()
    results = tensors_in(host.call(BINDINGS[name], *arguments))
    expected = tensors_in(getattr(torch.ops.repro, name).default(*on_meta))
    assert [(t.shape, t.dtype, t.stride()) for t in results] == [
        (t.shape, t.dtype, t.stride()) for t in expected
    ]
    operands = [t for t in tensors_in(arguments) if t.dim()]
    written = {t.data_ptr(): t for t in [*operands, *results] if t.nbytes}
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


def test_costs_equal_values_computed_by_hand() -> None:
    assert cost("layer_norm", (2, 3, 8), (8,), (8,)) == Cost(8 * 48 + 4 * 6, 4 * 64, 4 * 48 + 8 * 6)
    assert cost("repro::bias_gelu.default", (4, 8), (8,), itemsize=2) == Cost(8 * 32, 2 * 40, 2 * 32)
    assert cost("bias_dropout_residual", (1, 2, 8), None, (1, 2, 8)) == Cost(16, 4 * 32, 4 * 16)
    assert cost("bias_dropout_residual", (1, 2, 8), (8,), (1, 2, 8), 0.1) == Cost(48, 4 * 40, 4 * 16)
    assert cost("bias_dropout_residual_backward", (1, 2, 8), False) == Cost(16, 64, 64)
    assert cost("cross_entropy_max", (4, 10), itemsize=2) == Cost(40, 80, 16)
    assert cost("causal_softmax", (2, 8, 8), 0.5, itemsize=2) == Cost(6 * 128, 256, 256)
    assert cost("causal_softmax_backward", (2, 8, 8), (2, 8, 8), 0.5, itemsize=2) == Cost(5 * 128, 512, 256)
    assert cost("norm_squared", [(4, 10), (3,)]) == Cost(86, 4 * 43, 4)
    assert cost("sum_rows", (6, 8), itemsize=2) == Cost(48, 96, 16)
    row, statistic = (2, 3, 8), (2, 3, 1)
    # Read or written: three tensors of 48 elements, two of 6 statistics, and three of 8 weights.
    assert cost("layer_norm_backward", row, row, statistic, statistic, (8,)) == Cost(
        14 * 48, 4 * (2 * 48 + 2 * 6 + 8), 4 * (48 + 2 * 8)
    )
    assert cost("rms_norm", (2, 3, 8), (8,)) == Cost(4 * 48 + 3 * 6, 4 * 56, 4 * 48 + 4 * 6)
    assert cost("rms_norm_backward", row, row, statistic, (8,)) == Cost(
        9 * 48, 4 * (2 * 48 + 6 + 8), 4 * (48 + 8)
    )
    assert cost("swiglu", (4, 16), itemsize=2) == Cost(3 * 32, 2 * 64, 2 * 32)
    assert cost("swiglu_backward", (4, 8), (4, 16), itemsize=2) == Cost(8 * 32, 2 * 96, 2 * 64)
    # Two of three heads of width 6 are rotated, 4 elements of each.
    assert cost("rotary", (2, 5, 18), 2, 6, 4) == Cost(3 * 10 * 8, 4 * 180, 4 * 180)
    assert cost("bias_gelu_backward", (4, 8), (4, 8), (8,), itemsize=2) == Cost(17 * 32, 2 * 72, 2 * 40)
    assert cost("bias_dropout_residual_backward", (1, 2, 8), True) == Cost(32, 64, 64 + 4 * 8)
    targets = torch.empty(4, dtype=torch.int64, device="meta")
    sums = Cost(3 * 40 + 4, 4 * 40 + 4 * 4 + 8 * 4, 2 * 4 * 4)
    assert cost("cross_entropy_sums", (4, 10), (4,), targets, 0) == sums
    # Read: logits, maxima, the first row of sums, targets, gradients of the loss. Written: logits.
    gradient = Cost(3 * 40 + 2 * 4, 4 * 40 + 4 * 4 + 4 * 4 + 8 * 4 + 4 * 4, 4 * 40)
    assert cost("cross_entropy_backward_", (4, 10), (4,), (2, 4), targets, 0, (4,)) == gradient
    bf16, fp32 = torch.empty(10, dtype=torch.bfloat16, device="meta"), torch.empty(10, device="meta")
    # 12 bytes of states read and written, 2 of gradient read, 2 of parameter written: 28 per parameter.
    assert cost("adamw_", [fp32], [bf16], [fp32], [fp32], [bf16]) == Cost(140, 140, 140)


def test_cost_of_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(ValueError, match="no operator repro::softmax"):
        cost("softmax", (1,))
